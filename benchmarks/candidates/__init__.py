"""What may come into the package once it has won on hardware: `orthogonalizer`s."""
