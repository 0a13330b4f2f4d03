"""The meeting point of one host's workers for torch's elastic agent: a store that listens on the loopback interface.

torch's own rendezvous listen on all interfaces, and whoever reaches such a store can write to it.
"""

import socket

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

ADDRESS = "127.0.0.1"


class Loopback(RendezvousHandler):
    """One host, always there."""

    def __init__(self, parameters: RendezvousParameters):
        self._run_id = parameters.run_id
        with socket.socket() as sock:
            sock.bind((ADDRESS, 0))
            sock.listen(1024)
            self._port = sock.getsockname()[1]
            self._store = TCPStore(
                ADDRESS, self._port, is_master=True, wait_for_workers=False, master_listen_fd=sock.detach()
            )
        self._round = 0

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return "loopback"

    def next_rendezvous(self) -> RendezvousInfo:
        self._round += 1
        store = PrefixStore(f"round {self._round}", self._store)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(ADDRESS, self._port))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


def register_loopback() -> None:
    """Make "loopback" known to torch's launcher; a second call does nothing."""
    rendezvous_handler_registry.register("loopback", Loopback)
