"""The ways into a vLLM engine's workers, and which of them an engine offers.

    BackendSession    a weight-transfer backend, within vLLM's own update session
    BackendMessages   a weight-transfer backend by messages alone, which any hook passes on
    Extension         a worker extension, through collective_rpc

Chosen by what an engine has, never by its version.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Protocol

from weightsync.deadline import Deadline

__all__ = [
    "BACKEND",
    "EXTENSION",
    "BackendMessages",
    "BackendSession",
    "Caller",
    "Extension",
    "Offer",
    "ThroughWay",
    "Way",
    "choose",
]

BACKEND = "weightsync"
EXTENSION = "weightsync.adapters.vllm.worker_extension.WeightSyncWorkerExtension"


class Caller(Protocol):
    """How a connector calls into its engine."""

    def call(self, name: str, body: dict[str, Any] | None, deadline: Deadline) -> Any:
        """One of vLLM's own calls: a route of the server, or a method of ``LLM``."""
        ...

    def rpc(self, method: str, arguments: list[str], deadline: Deadline) -> list[Any]:
        """A method on every worker; their answers, by rank."""
        ...


class Way(ABC):
    """The calls of `weightsync.engines.base.Engine` that end on a worker. Their answers travel on
    the sender's own socket.

    Attributes:
        name: for messages.
        asks_workers: `version` is what the workers know, and so also right after weights came by
            handles, of which vLLM itself knows nothing.
    """

    name: str
    asks_workers = False

    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    @abstractmethod
    def open_session(self, path: str, token: str, deadline: Deadline) -> None: ...

    @abstractmethod
    def prepare(self, deadline: Deadline) -> None: ...

    @abstractmethod
    def look(self, deadline: Deadline) -> None: ...

    @abstractmethod
    def apply(self, update_id: str, deadline: Deadline) -> None: ...

    @abstractmethod
    def begin(self, deadline: Deadline) -> None: ...

    @abstractmethod
    def finish(self, deadline: Deadline) -> None: ...

    @abstractmethod
    def adopt_session(self, is_open: bool) -> None: ...

    def version(self, deadline: Deadline) -> str | None:
        """What the workers know themselves; None where they cannot answer."""
        return None


class _WithoutSession(Way):
    """vLLM has no session of its own here that must be open, closed, or may have been left open."""

    def begin(self, deadline: Deadline) -> None:
        pass

    def finish(self, deadline: Deadline) -> None:
        pass

    def adopt_session(self, is_open: bool) -> None:
        pass


class BackendSession(Way):
    """vLLM's own update session: finished if it was started, and only then.

    Without one that is open, finishing raises on every rank, which at tensor parallelism above one
    spoils vLLM's queue of replies.
    """

    name = "backend session"
    _open = False

    def open_session(self, path: str, token: str, deadline: Deadline) -> None:
        info = {"path": path, "session": token}
        self._caller.call("init_weight_transfer_engine", {"init_info": info}, deadline)

    def prepare(self, deadline: Deadline) -> None:
        self.begin(deadline)
        self.finish(deadline)

    def look(self, deadline: Deadline) -> None:
        # By a message, outside of vLLM's session, of which somebody else may be in the midst.
        self._caller.call("init_weight_transfer_engine", {"init_info": {"call": "look"}}, deadline)

    def begin(self, deadline: Deadline) -> None:
        self._open = True
        self._caller.call("start_weight_update", None, deadline)

    def apply(self, update_id: str, deadline: Deadline) -> None:
        info = {"update_id": update_id}
        self._caller.call("update_weights", {"update_info": info}, deadline)

    def finish(self, deadline: Deadline) -> None:
        if self._open:
            self._caller.call("finish_weight_update", None, deadline)
            self._open = False

    def adopt_session(self, is_open: bool) -> None:
        self._open = is_open


class BackendMessages(_WithoutSession):
    """Every call is one that vLLM hands to the backend as it is; see
    `weightsync.adapters.vllm.backend`."""

    name = "backend messages"

    def open_session(self, path: str, token: str, deadline: Deadline) -> None:
        self._tell({"call": "join", "path": path, "session": token}, deadline)

    def prepare(self, deadline: Deadline) -> None:
        self._tell({"call": "prepare"}, deadline)
        self._tell({"call": "finish"}, deadline)

    def look(self, deadline: Deadline) -> None:
        self._tell({"call": "look"}, deadline)

    def apply(self, update_id: str, deadline: Deadline) -> None:
        self._tell({"call": "apply", "update_id": update_id}, deadline)

    def _tell(self, message: dict[str, str], deadline: Deadline) -> None:
        self._caller.call("init_weight_transfer_engine", {"init_info": message}, deadline)


class Extension(_WithoutSession):
    """See `weightsync.adapters.vllm.worker_extension`."""

    name = "worker extension"
    asks_workers = True

    def open_session(self, path: str, token: str, deadline: Deadline) -> None:
        self._caller.rpc("weightsync_join", [path, token], deadline)

    def prepare(self, deadline: Deadline) -> None:
        self._caller.rpc("weightsync_prepare", [], deadline)

    def look(self, deadline: Deadline) -> None:
        self._caller.rpc("weightsync_look", [], deadline)

    def apply(self, update_id: str, deadline: Deadline) -> None:
        self._caller.rpc("weightsync_apply", [update_id], deadline)

    def version(self, deadline: Deadline) -> str | None:
        versions = set(self._caller.rpc("weightsync_version", [], deadline))
        found = versions.pop() if len(versions) == 1 else None
        return None if found is None else str(found)


@dataclass(frozen=True, slots=True)
class Offer:
    """What an engine was started with, and what its vLLM has.

    Attributes:
        backend: name of its weight-transfer backend, or None.
        extension: path of its worker extension class, or None.
        has_sessions: its update sessions are the backend's own. Told by its being able to start
            one for a draft model; the older hook, which reloads around the backend, cannot.
    """

    backend: str | None
    extension: str | None
    has_sessions: bool

    @property
    def described(self) -> str:
        """For messages."""
        return f"weight-transfer backend {self.backend!r} and worker extension {self.extension!r}"

    @property
    def backend_would_work(self) -> bool:
        """Whether this vLLM is known to take a backend of others. Where it is not, a worker
        extension works in any case."""
        return self.has_sessions


def choose(offer: Offer, caller: Caller, extension: str) -> Way | None:
    """The way to use: the backend, else the extension (its path, to be recognized by); None where
    an engine offers neither."""
    if offer.backend == BACKEND:
        return BackendSession(caller) if offer.has_sessions else BackendMessages(caller)
    if offer.extension == extension:
        return Extension(caller)
    return None


class ThroughWay(ABC):
    """What connectors have in common: calls that end on workers go through the way that was chosen.
    See `weightsync.engines.base.Engine`.

    Attributes:
        way: its name, for messages.
    """

    _way: Way
    _reports_version: bool
    """vLLM itself knows of weight versions."""

    @property
    def way(self) -> str:
        return self._way.name

    def open_session(self, path: str, token: str, deadline: Deadline) -> None:
        self._way.open_session(path, token, deadline)

    def prepare(self, deadline: Deadline) -> None:
        self._way.prepare(deadline)

    def look(self, deadline: Deadline) -> None:
        self._way.look(deadline)

    def begin(self, deadline: Deadline) -> None:
        self._way.begin(deadline)

    def apply(self, update_id: str, deadline: Deadline) -> None:
        self._way.apply(update_id, deadline)

    def finish(self, deadline: Deadline) -> None:
        self._way.finish(deadline)

    def adopt_session(self, is_open: bool) -> None:
        self._way.adopt_session(is_open)

    def set_version(self, version: str, deadline: Deadline) -> None:
        """Nothing, where this vLLM reports no version."""
        if self._reports_version:
            self._set_reported_version(version, deadline)

    def version(self, deadline: Deadline) -> str | None:
        if self._way.asks_workers or not self._reports_version:
            return self._way.version(deadline)
        return self._reported_version(deadline)

    @abstractmethod
    def _set_reported_version(self, version: str, deadline: Deadline) -> None: ...

    @abstractmethod
    def _reported_version(self, deadline: Deadline) -> str | None: ...
