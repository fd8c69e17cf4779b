"""Models of real libraries, and what an expert says of every leaf before it is read."""
