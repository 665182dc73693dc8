"""What is measured: lists of experiments, most important first."""
