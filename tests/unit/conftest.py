"""Examples that are drawn slowly, on a machine that is busy, say nothing of what is tested."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "busy machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("busy machine")
