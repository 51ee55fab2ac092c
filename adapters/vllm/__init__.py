"""vLLM: a weight-transfer backend by plugin, or a worker extension; no patch. Importing this
package imports nothing of vLLM.

    plugin            registers the backend; called by every vLLM process, never raises
    backend           a worker's weight-transfer backend, behind either of vLLM's hooks
    worker_extension  a worker's extension: for vLLMs without such a hook, and for handles
    worker_side       what these share: a target, a receiver, calls that never raise
    handle_update     a full update from handles, on all workers or on none
    exchange          what workers tell each other for that
    target            holds one worker's weights
    limits            engines that are refused by a setting
    support           vLLMs that lack what a reload needs
    trace             the meta twin and what its loader takes     (private names of vLLM)
    reload            whole tensors through layerwise reload      (private names of vLLM)
    served            what the live model holds, digested after an update
    readable          how each parameter can be read back   (private names of vLLM)
    probe             packed linear layers, through a product (private names of vLLM)
    experts           packed experts                        (private names of vLLM)
    packing           where packing moves elements, learnt from it
    loaders           which parameters a loader writes through their own loader
    guard             refuses requests while a worker is poisoned
    ways              the ways into an engine's workers, and which of them it offers
    connector         the trainer's side: entry points
    connector_http    a live server by URL
    connector_object  an ``LLM`` object of this process
    demo              the engine of ``weightsync demo``
"""
