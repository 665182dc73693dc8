"""Action distributions, and the heads that draw actions from them."""
