"""Multi-agent MuJoCo (MaMuJoCo)."""
