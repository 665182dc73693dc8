"""Policies whose tensor operations are recorded once and repeated in the step loop."""
