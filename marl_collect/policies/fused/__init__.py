"""Records a policy's tensor operations once and repeats them in the step loop."""
