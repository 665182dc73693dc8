"""PettingZoo environments, parallel and AEC, by task name or custom."""
