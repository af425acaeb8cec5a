"""What solvers search with: tables of runs of ops, labels over positions, changes of plans."""
