"""Action distributions, and the heads that sample actions from them."""
