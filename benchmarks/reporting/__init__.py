"""From a run's JSON to what people read."""
