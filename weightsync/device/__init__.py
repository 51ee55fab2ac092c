"""What runs on a GPU: its kernels, compiled at first use, and their launches.

Importing this package, or any module in it, touches no GPU and imports no cupy.
"""
