"""Fixtures of all tests, and the imports of ranks, which are forked from this process.

Everything that ranks need is imported here, once, and no thread is started.
A worker of pytest-xdist has one thread, which only waits for the name of the next test. The process
that hands out the tests runs none, and imports nothing of this.
"""

import os
import tempfile

import pytest

os.environ["OMP_NUM_THREADS"] = "1"  # a forked child of a process with OpenMP threads would hang
# workers and ranks would compile all modules again, for seconds each
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ["HF_HUB_OFFLINE"] = "1"  # no test asks the network for anything
# Tests use the CPU on any machine. Only the children of tests/gpu/ see the GPUs that the user has
# made visible.
os.environ.setdefault("LOCKSTEP_TESTS_GPUS", os.environ.get("CUDA_VISIBLE_DEVICES", "all"))
os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_configure(config):
    if not getattr(config.option, "numprocesses", None):  # a worker, or the only process
        import helpers.preloaded  # noqa: F401

        from utils.data.decoders import DECODERS

        if "torchvision" in DECODERS["JPEG decoder"]:  # where torchcodec has no wheel
            config.addinivalue_line("filterwarnings", "ignore:The image decoding")


@pytest.fixture(autouse=True)
def own_folders(tmp_path):
    """Caches and runs in the test's own folder, and its own environment."""
    from helpers.training_runs import working_in

    before = dict(os.environ)
    with working_in(tmp_path):
        yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(autouse=True)
def no_ranks_left():
    """A failed test leaves no ranks behind."""
    from helpers.launched_runs import end_launched
    from helpers.ranks import end_leftovers

    yield
    end_leftovers()
    end_launched()


@pytest.fixture
def anyones_folder(monkeypatch):
    """The current folder is one that a user without rights may use, not below root's."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="lockstep-") as folder:
        os.chmod(folder, 0o777)
        for name in ("HOME", "HF_HOME"):
            monkeypatch.setenv(name, folder)
        monkeypatch.chdir(folder)
        yield
