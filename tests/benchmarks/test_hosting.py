"""Systems in processes of their own."""

import os
import signal

import pytest

from benchmarks.hosting import Host, HostError

HERE = __name__


class Counter:
    """A system that returns its process id and the number of its turns."""

    def __init__(self, start):
        self.count = start

    def turn(self):
        self.count += 1
        return {"pid": os.getpid(), "count": self.count}

    def fail(self):
        print("before the fall")
        raise ValueError("a bad turn")

    def close(self):
        pass


@pytest.fixture
def host():
    host = Host("counter", f"{HERE}:Counter", 5)
    yield host
    host.close()


@pytest.mark.timeout(60)
def test_host_keeps_its_system_in_another_process_until_it_raises(host):
    first, second = host.turn(), host.turn()
    assert first == {"pid": host.pid, "count": 6}
    assert second == {"pid": host.pid, "count": 7}
    assert host.pid != os.getpid()
    with pytest.raises(HostError, match=r"(?s)counter failed.*ValueError: a bad turn"):
        host.call("fail")
    host.close()
    with pytest.raises(ProcessLookupError):
        os.kill(host.pid, 0)


@pytest.mark.timeout(60)
def test_killed_host_is_an_error_and_not_a_hang(host):
    os.kill(host.pid, signal.SIGKILL)
    with pytest.raises(HostError, match="counter died with exit code -9"):
        host.turn()


@pytest.mark.timeout(60)
def test_system_that_cannot_be_made_is_an_error():
    with pytest.raises(HostError, match="ModuleNotFoundError"):
        Host("nobody", "benchmarks.systems.nobody:make")
