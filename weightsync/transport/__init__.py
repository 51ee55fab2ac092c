"""How bytes move between a trainer and an engine's workers. One small file per way."""
