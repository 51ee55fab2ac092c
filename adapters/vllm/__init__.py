"""vLLM: a weight-transfer backend by plugin, no patch. Importing this package imports nothing of
vLLM.

    plugin       registers the backend; called by every vLLM process on the machine, never raises
    backend      the worker's side: vLLM's calls mapped to a receiver
    target       holds one worker's weights
    limits       engines that are refused by a setting
    trace        the meta twin and what its loader takes     (private names of vLLM)
    reload       whole tensors through layerwise reload      (private names of vLLM)
    guard        refuses requests while a worker is poisoned
    connector    the trainer's side: a live server by URL, or an ``LLM`` object
    demo         the engine of ``weightsync demo``
"""
