"""JaxMARL, simulators of many worlds that JAX compiles."""
