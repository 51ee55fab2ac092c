"""Engine adapters. Installed as `weightsync.adapters`; each folder imports its own engine and no other."""
