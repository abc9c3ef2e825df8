"""utils/hub.py: names on the Hugging Face Hub without a network, behind a slow one, misspelt."""

import socket
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import datasets
import huggingface_hub.utils._http as client
import pytest
from helpers.loading import error_of

from utils import hub
from utils.runs import foreign


@pytest.fixture(autouse=True)
def online(monkeypatch):
    """The settings of the client as without HF_HUB_OFFLINE, and no waits between attempts."""
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setattr(hub, "_OFFLINE", False)
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(client.time, "sleep", lambda _: pytest.fail("another attempt"))
    client.close_session()


def use(monkeypatch, url):
    monkeypatch.setattr(hub.constants, "ENDPOINT", url)
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


def free_port() -> int:
    """A port on which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@contextmanager
def hub_that_answers(after: threading.Event):
    """A hub without any repository, which answers when the event is set."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self):
            asked.append(self.path)
            after.wait(60)
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_GET = do_HEAD

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()


def test_without_a_network_a_name_is_refused_in_one_line_without_more_attempts(monkeypatch, capfd):
    use(monkeypatch, f"http://127.0.0.1:{free_port()}")
    line = error_of("someone/something")
    assert "cannot be loaded from the Hub (Couldn't reach 'someone/something' on the Hub" in line
    assert line.endswith("; check the name and the network, or give a local folder")
    with pytest.raises(ValueError, match=r"^--init_from hf://a/b: model.safetensors of a/b cannot"):
        foreign._download("--init_from", "hf://a/b")
    assert "".join(capfd.readouterr()) == ""


def test_a_slow_network_is_waited_for_and_a_misspelt_name_is_refused_at_once(monkeypatch, capfd):
    """The connection is enough: this hub answers only when it is no longer waited for."""
    monkeypatch.setattr(hub, "PATIENCE", 60.0)
    answer, connects = threading.Event(), hub._connects
    monkeypatch.setattr(hub, "_connects", lambda: (connects(), answer.set())[0])
    with hub_that_answers(answer) as (url, asked):
        use(monkeypatch, url)
        line = error_of("someone/somethng")
        assert "'someone/somethng' doesn't exist on the Hub" in line and asked
    assert "".join(capfd.readouterr()) == ""


def test_the_look_up_of_a_host_that_never_ends_is_not_waited_for(monkeypatch):
    ends = threading.Event()

    def look_up(*_):
        ends.wait(60)
        raise OSError

    monkeypatch.setattr(hub, "PATIENCE", 0.2)
    monkeypatch.setattr(socket, "create_connection", look_up)
    assert not hub._connects()
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    assert hub._connects()  # only the proxy knows
    ends.set()


def test_the_hub_is_asked_again_when_it_can_be_reached_again(monkeypatch):
    monkeypatch.setattr(hub, "PATIENCE", 60.0)
    use(monkeypatch, f"http://127.0.0.1:{free_port()}")
    hub.use_hub()
    assert hub.constants.HF_HUB_OFFLINE
    with socket.create_server(("127.0.0.1", 0)) as server:
        use(monkeypatch, f"http://127.0.0.1:{server.getsockname()[1]}")
        hub.use_hub()
        assert not hub.constants.HF_HUB_OFFLINE
    monkeypatch.setattr(hub, "_OFFLINE", True)
    hub.use_hub()
    assert hub.constants.HF_HUB_OFFLINE
