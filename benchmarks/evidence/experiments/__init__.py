"""One module per experiment: `experiment(lab, plan)` trains and returns its section."""
