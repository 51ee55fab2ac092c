"""Engine adapters. Installed as `weightsync.adapters`; each folder imports its own engine and no
other."""

if __name__ == "adapters":
    raise ImportError("import weightsync.adapters: this folder is no package of its own")
