"""``marl-collect view`` shows datasets to a browser of this machine, or in one file."""

import itertools
import json
import re
import shutil
import signal
import socket
import struct
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.browser import CHROMIUM, Browser
from support.commands import error_of, output_of, run
from support.processes import SOON, wait_until
from support.scripts import LIMIT, run_python, start_python
from workloads.counting import CountingEnv

from marl_collect import record
from marl_collect.cli.tasks import find_factory
from marl_collect.cli.view import _episodes
from marl_collect.cli.viewer import server
from marl_collect.cli.viewer.episodes import Episodes
from marl_collect.envs import FrameStack
from marl_collect.rendering.pictures import to_picture, to_png
from marl_collect.storage import open_dataset
from marl_collect.training.run_folder import write_table

pytestmark = pytest.mark.processes

STACKS = """
from marl_collect.envs import FrameStack
from workloads.counting import CountingEnv


def make(frames=3):
    return FrameStack(CountingEnv(), frames)
"""
TASK = "workloads.counting:CountingEnv"
VIEW = ("-m", "marl_collect.cli.main", "view")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("view") / "data"
    record(folder, CountingEnv, None, episodes=4, seed=0, num_workers=1)
    return folder


def episodes(folder: Path) -> Episodes:
    """Return the episodes of a dataset whose environment is not known."""
    trajectories = open_dataset(folder).trajectories
    return Episodes(trajectories, lambda: "There is no environment here.")


@pytest.fixture
def viewer(data: Path) -> Episodes:
    return episodes(data)


def saved(page: str) -> Any:
    (text,) = re.findall(r'<script id="saved"[^>]*>(.*?)</script>', page, re.DOTALL)
    return json.loads(text)


def test_the_list_has_returns_and_lengths(data: Path, viewer: Episodes) -> None:
    trajectories = open_dataset(data).trajectories
    page = viewer.listed(0)
    assert page["next"] is None
    assert page["length"] == trajectories.lengths.tolist()
    assert page["team"] == pytest.approx(trajectories.returns.tolist())
    assert np.sum(page["returns"], 1) == pytest.approx(page["team"])
    names = viewer.about()["policies"]
    assert {names[i] for row in page["policies"] for i in row} == {"random actions"}


def test_an_episode_has_what_each_agent_did(data: Path, viewer: Episodes) -> None:
    frames = open_dataset(data).trajectories[1]
    answer = viewer.episode(1, 0)
    for agent_info, agent in zip(
        viewer.about()["agents"], answer["agents"], strict=True
    ):
        group = agent_info["group"]
        row = [
            a["name"] for a in viewer.about()["agents"] if a["group"] == group
        ].index(agent_info["name"])
        reward = frames["next", group, "reward"][:, row, 0].double()
        assert agent["reward"] == pytest.approx(reward.tolist(), rel=1e-6)
        assert agent["return"][-1] == pytest.approx(float(reward.sum()), rel=1e-6)
        (lines,) = [line for line in agent["lines"] if line["name"] == "action"]
        assert len(lines["values"][0]) == answer["length"] == len(frames)
        action = frames[group, "action"][:, row].reshape(len(frames), -1)[:, 0]
        assert lines["values"][0] == pytest.approx(action.tolist(), rel=1e-6)
    for agent, later in zip(
        answer["agents"], viewer.episode(1, 2)["agents"], strict=True
    ):
        assert all(later[name] == agent[name][2:] for name in ("reward", "return"))


def test_an_agent_that_dies_is_marked_with_its_last_frame(tmp_path: Path) -> None:
    record(tmp_path, CountingEnv, None, episodes=6, seed=0)
    dataset = open_dataset(tmp_path).trajectories
    page, deaths = episodes(tmp_path), 0
    for number in range(len(dataset)):
        frames = dataset[number]
        agents = zip(
            page.about()["agents"], page.episode(number, 0)["agents"], strict=True
        )
        for about, agent in agents:
            group = about["group"]
            row = dataset.description.environment.groups[group].agents.index(
                about["name"]
            )
            expected = [
                {"frame": t, "kind": kind}
                for kind in ("terminated", "truncated")
                for t in range(len(frames) - 1)
                if frames["next", group, kind][t, row, 0]
                and not (t and frames["next", group, kind][t - 1, row, 0])
            ]
            assert agent["ends"] == expected
            deaths += len(expected)
    assert deaths


def test_an_episode_that_cannot_be_drawn_says_why(viewer: Episodes) -> None:
    with pytest.raises(ValueError, match="no environment here"):
        viewer.picture(0, 0, 0)
    assert list(viewer.pictures(0)) == []


def drawing(folder: Path, factory: Any) -> Episodes:
    """Return the episodes of a dataset, drawn with environments of a factory."""
    return Episodes(open_dataset(folder).trajectories, lambda: factory)


def test_states_are_drawn_if_needed(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[tuple[int, int]] = []
    closed: list[int] = []
    numbers = itertools.count()

    def make() -> CountingEnv:
        env, number = CountingEnv(), next(numbers)
        step_row, close = env.step_row, env.close

        def watched_step(*args: Any) -> None:
            steps.append((number, threading.get_ident()))
            step_row(*args)

        def watched_close() -> None:
            closed.append(number)
            close()

        monkeypatch.setattr(env, "step_row", watched_step)
        monkeypatch.setattr(env, "close", watched_close)
        return env

    viewer = drawing(data, make)
    first = viewer.picture(0, 0, 2)
    assert isinstance(first, Future)
    drawn = first.result()
    assert [number for number, _ in steps] == [0, 0]
    assert viewer.picture(0, 0, 2).result() == drawn
    assert len(steps) == 2
    assert closed == []
    viewer.picture(1, 0, 1).result()
    assert closed == [0]
    last = len(open_dataset(data).trajectories[1]) - 1
    viewer.picture(1, 0, last).result()
    # With the step after it, whose observation is compared.
    assert [number for number, _ in steps] == [0, 0] + [1] * (last + 1)
    assert closed == [0, 1]
    viewer.picture(0, 0, 1).result()
    viewer.close()
    assert closed == [0, 1, 2]
    assert len({thread for _, thread in steps}) == 1


def test_an_episode_that_differs_says_so_from_that_state_on(data: Path) -> None:
    viewer = drawing(data, partial(CountingEnv, min_length=30, max_length=30))
    seen = open_dataset(data).trajectories[0]
    other = drawing(data, partial(CountingEnv, min_length=3, max_length=3))
    assert len(seen) > 3
    assert viewer.picture(0, 0, 1).result()
    with pytest.raises(ValueError, match="ends with frame 2"):
        other.picture(0, 0, 5).result()
    assert other.picture(0, 0, 2).result()
    with pytest.raises(ValueError, match="ends with frame 2"):
        other.picture(0, 0, 5).result()
    with pytest.raises(LookupError, match="no such frame"):
        viewer.picture(0, 0, 99).result()
    viewer.close()
    other.close()
    with pytest.raises(ValueError, match="was closed"):
        other.picture(1, 0, 0)


def test_an_environment_that_hangs_does_not_keep_the_viewer_from_ending(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs, goes_on = threading.Event(), threading.Event()

    def make() -> CountingEnv:
        hangs.set()
        goes_on.wait(SOON)
        return CountingEnv()

    monkeypatch.setattr("marl_collect.cli.viewer.episodes._CLOSING", 0.1)
    before = set(threading.enumerate())
    shown = drawing(data, make)
    picture = shown.picture(0, 0, 1)
    assert isinstance(picture, Future)
    assert hangs.wait(SOON)
    (thread,) = set(threading.enumerate()) - before
    assert thread.daemon
    shown.close()
    assert thread.is_alive()
    goes_on.set()
    with pytest.raises(ValueError, match="was closed"):
        picture.result(SOON)
    thread.join(SOON)
    assert not thread.is_alive()


def test_a_browser_that_left_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    picture: Future[bytes] = Future()
    asked = threading.Event()

    def slow() -> Future[bytes]:
        asked.set()
        return picture

    with serving({"/slow": slow}) as running:
        with socket.create_connection(address_of(running)) as browser:
            linger = struct.pack("ii", 1, 0)  # Closing resets the connection.
            browser.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            request = f"GET /slow?token={running.token} HTTP/1.1"
            host = f"Host: 127.0.0.1:{running.server_port}"
            browser.sendall(f"{request}\r\n{host}\r\n\r\n".encode())
            assert asked.wait(SOON)
        picture.set_result(b"<svg/>" * 1_000_000)  # More than buffers hold.
        name = "process_request_thread"
        wait_until(lambda: not any(name in t.name for t in threading.enumerate()))
    assert capsys.readouterr().err == ""


def test_requests_do_not_wait_for_a_picture() -> None:
    picture: Future[bytes] = Future()
    answers = {"/slow": lambda: picture, "/fast": lambda: 1}
    with serving(answers) as running, ThreadPoolExecutor() as pool:
        waiting = pool.submit(status, with_token(running, "/slow"))
        assert status(with_token(running, "/fast")) == (200, "1")
        assert not waiting.done()
        picture.set_result(b"<svg/>")
        assert waiting.result() == (200, "<svg/>")


@pytest.fixture
def running(viewer: Episodes) -> Iterator[server.Viewer]:
    answers: server.Answers = {
        "/about": viewer.about,
        "/episodes": viewer.listed,
        "/episode": viewer.episode,
        "/picture": viewer.picture,
    }
    with serving(answers) as running:
        yield running


@contextmanager
def serving(answers: server.Answers) -> Iterator[server.Viewer]:
    """Serve answers."""
    running = server.Viewer(answers, 0)
    thread = threading.Thread(target=running.serve_forever, args=(0.01,))
    thread.start()
    yield running
    running.shutdown()
    thread.join()
    running.server_close()


def address_of(running: server.Viewer) -> tuple[str, int]:
    return "127.0.0.1", running.server_port


def with_token(running: server.Viewer, request: str) -> str:
    """Return the address of a request such as ``/episode?number=0``."""
    separator = "&" if "?" in request else "?"
    port, token = running.server_port, running.token
    return f"http://127.0.0.1:{port}{request}{separator}token={token}"


def status(request: urllib.request.Request | str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_page_data_and_errors_are_sent(
    running: server.Viewer, viewer: Episodes
) -> None:
    code, page = status(running.address)
    assert code == 200
    assert saved(page) is None
    code, text = status(with_token(running, "/about"))
    assert (code, json.loads(text)) == (200, viewer.about())
    code, text = status(with_token(running, "/picture?number=0&source=0&frame=0"))
    assert (code, json.loads(text)) == (400, {"error": "There is no environment here."})


@pytest.mark.parametrize(
    ("request_line", "message"),
    [
        ("/episode?number=99999999999999999999&begin=0", "number is 9999"),
        (f"/episode?number={2**53}&begin=0", f"number is {2**53}, but expected 0"),
        ("/episode?number=-1&begin=0", "number is -1, but expected 0"),
        ("/episode?number=4&begin=0", "4"),
        (f"/episode?number={'9' * 5000}&begin=0", "integer string conversion"),
        (f"/episodes?begin={10**30}", "begin is 1000"),
        ("/picture?number=x", "invalid literal"),
        ("/picture?source=1", "missing"),
        ("/about?number=1", "unexpected keyword argument"),
        ("/../secret", "There is no page /../secret."),
        ("/broken", "RuntimeError: of the environment"),
        ("/nan", "not JSON compliant"),
    ],
)
def test_a_wrong_request_is_answered_with_an_error(
    running: Any, capsys: Any, request_line: str, message: str
) -> None:
    def broken() -> None:
        raise RuntimeError("of the environment")

    assert isinstance(running._answers, dict)
    running._answers.update({"/broken": broken, "/nan": lambda: float("nan")})
    code, text = status(with_token(running, request_line))
    assert code == 400
    assert message in json.loads(text)["error"]
    assert capsys.readouterr().err == ""


def test_the_server_refuses_the_pages_of_other_servers(running: server.Viewer) -> None:
    other = urllib.request.Request(
        with_token(running, "/about"), headers={"Host": "evil.example"}
    )
    assert status(other)[0] == 403


@pytest.mark.parametrize("path", ["/", "/about", "/episodes?begin=0", "/nothing"])
@pytest.mark.parametrize("token", ["", "token=", "token=x", "token=%C3%A9%FF", "a=1"])
def test_the_token_is_required(running: server.Viewer, path: str, token: str) -> None:
    separator = "&" if "?" in path else "?"
    address = f"http://127.0.0.1:{running.server_port}"
    code, text = status(f"{address}{path}{separator}{token}")
    assert code == 403
    assert "lacks the token" in text
    # Neither does it take the token of another server, or its own with more.
    with serving({}) as other:
        for wrong in (other.token, running.token[:-1], running.token + "x"):
            code, _ = status(f"{address}{path}{separator}token={wrong}")
            assert code == 403


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_requests_of_the_page_have_its_token(running: server.Viewer) -> None:
    (script,) = re.findall(r"<script>(.*?)</script>", server.page(), re.DOTALL)
    complete = re.search(r"const token = .*?\n}\n", script, re.DOTALL)
    assert complete is not None
    search = json.dumps(running.address.partition("/?")[2])
    program = f"const location = {{search: {search}}};{complete[0]}"
    requests = ["/about", "/episode?number=1&begin=0"]
    program += f"console.log({json.dumps(requests)}.map(complete).join('\\n'))"
    options: Any = {"check": True, "capture_output": True, "text": True}
    node = subprocess.run(["node", "-e", program], **options)
    for request, sent in zip(requests, node.stdout.split(), strict=True):
        assert sent.startswith(request)
        assert status(f"http://127.0.0.1:{running.server_port}{sent}")[0] == 200


def test_the_command_prints_the_address_with_the_token(data: Path) -> None:
    with served(data) as address:
        assert status(address)[0] == 200
        assert status(address.partition("?")[0])[0] == 403


def test_the_server_listens_on_this_machine_only(running: server.Viewer) -> None:
    assert running.socket.getsockname()[0] == "127.0.0.1"


def test_a_token_cannot_be_guessed() -> None:
    tokens = set()
    for _ in range(10):
        with server.Viewer({}, 0) as made:
            tokens.add(made.token)
    assert len(tokens) == 10
    assert min(map(len, tokens)) >= 43  # 32 bytes.


def test_the_browser_gets_the_token_from_a_file_of_the_user_alone() -> None:
    address = "http://127.0.0.1:5/?token=abc"
    with server.redirection(address) as given:
        assert "abc" not in given
        file = Path(urllib.request.url2pathname(given.removeprefix("file://")))
        assert file.stat().st_mode & 0o077 == 0
        assert f'content="0;url={address}"' in file.read_text()
    assert not file.exists()


def test_a_client_that_sends_nothing_is_not_waited_for(
    running: server.Viewer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server._Handler, "timeout", 0.1)
    for sent in (b"", b"GET /about HTTP/1.1\r\nHost: "):
        with socket.create_connection(address_of(running), SOON) as client:
            client.sendall(sent)
            assert client.recv(1) == b""  # The server has closed it.


def test_no_name_in_the_data_becomes_a_script() -> None:
    name = "</script><script>alert(1)</script>"
    page = server.page({"/about": {"title": name}})
    assert page.count("<script") == 2
    assert saved(page) == {"/about": {"title": name}}
    assert "innerHTML" not in page
    assert not re.findall(r"https?://", page)


def test_a_file_holds_the_chosen_episodes(data: Path, tmp_path: Path) -> None:
    file = tmp_path / "x.html"
    output_of("view", data, "--save", str(file), "--episode=2", "--episode=0")
    answers = saved(file.read_text())
    assert answers["/episodes?begin=0"]["number"] == [2, 0]
    requests = {r for r in answers if r.startswith("/episode?")}
    assert requests == {f"/episode?number={n}&begin=0" for n in (2, 0)}
    # By default: the best, the median and the worst one.
    assert run("view", data, "--save", str(file))[0] == 0
    returns = open_dataset(data).trajectories.returns
    order = sorted(range(4), key=lambda number: -returns[number])
    numbers = saved(file.read_text())["/episodes?begin=0"]["number"]
    assert numbers == [order[0], order[2], order[3]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--save=x.html", "--episode=9"], "no episode 9.* has 4 complete episodes"),
        (["--episode=1"], "add --save"),
        (["--save=x.html", "--port=80"], "--port and --no-browser are for the server"),
        (["--save=x.html", "--no-browser"], "for the server, .*: omit them"),
        (["--save=none/x.html"], "^error: There is no folder none. $"),
        (["--save=x.html", "--task=nothing_v0"], "nothing_v0"),
    ],
)
def test_wrong_arguments_are_errors(
    data: Path, arguments: list[str], message: str
) -> None:
    text = error_of("view", data, *arguments)
    assert re.search(message, text)


def test_a_folder_without_a_dataset_is_an_error(tmp_path: Path) -> None:
    text = error_of("view", tmp_path)
    assert "training runs" not in text
    write_table(tmp_path / "mine", [("frames", "return"), (1, 2)])
    text = error_of("view", tmp_path)
    assert "training runs, but no dataset. progress.csv" in text


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_a_stack_of_pictures_shows_its_newest_one(tmp_path: Path) -> None:
    def stacked() -> FrameStack:
        return FrameStack(CountingEnv(image=(6, 5, 3)), 2)

    record(tmp_path / "data", stacked, episodes=1, seed=0, num_workers=1)
    dataset = open_dataset(tmp_path / "data")
    view = episodes(tmp_path / "data")
    sources = view.episode(0, 0)["sources"]
    assert [source["name"] for source in sources] == ["hunter/observation/image"] * 2
    assert [source["agent"] for source in sources] == ["hunter_0", "hunter_1"]
    stacks = dataset.trajectories[0]["hunter", "observation", "image"]
    assert not torch.equal(stacks[2, 1, 0], stacks[2, 1, 1])
    assert view.picture(0, 1, 2) == to_png(to_picture(stacks[2, 1, 1]))


@pytest.mark.usefixtures("here")
def test_a_wrapped_environment_is_drawn_by_a_task_that_builds_it() -> None:
    Path("stacks_of_view.py").write_text(STACKS)
    record("data", find_factory("stacks_of_view:make", {}), episodes=1, num_workers=1)
    dataset = open_dataset("data")
    assert "FrameStack(counting)" in repr(dataset)
    view = _episodes("data", None)
    with pytest.raises(ValueError, match="cannot be built from its name.*module:fun"):
        view.picture(0, 0, 0)
    task_view = _episodes("data", "stacks_of_view:make")
    pictures = [task_view.picture(0, *k).result() for k in task_view.pictures(0)]
    task_view.close()
    assert len(set(pictures)) > 1


def test_the_script_is_valid(tmp_path: Path) -> None:
    (script,) = re.findall(r"<script>(.*?)</script>", server.page(), re.DOTALL)
    (tmp_path / "page.js").write_text(script)
    subprocess.run(["node", "--check", str(tmp_path / "page.js")], check=True)


RETURNS = ["-10", "-9", "6", "12"]
LENGTHS = ["11", "5", "5", "8"]
NUMBERS = ".row > span:nth-child(1)"
TEAM = ".row > span:nth-child(2)"


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    with Browser(tmp_path / "profile") as browser:
        yield browser
        assert browser.errors == []


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve the page of a folder; yield its address."""
    with start_python(*VIEW, folder, "--no-browser") as program:
        assert program.stdout is not None
        yield program.stdout.readline().split()[0]
        program.send_signal(signal.SIGINT)
        assert program.wait(LIMIT) == 0


def plays_and_filters(browser: Browser, address: str) -> None:
    browser.open(address)
    browser.wait_for("document.querySelectorAll('.row').length === 4")
    browser.wait_for("document.getElementById('about').textContent !== ''")
    assert browser.texts(TEAM) == RETURNS
    assert browser.texts(".row > span:nth-child(3)") == LENGTHS
    assert browser.texts("#about")[0].startswith("Episode 0: ")
    assert "The episodes cannot be drawn" in browser.texts("#pictures")[0]
    browser.click(".row:nth-of-type(2)")
    browser.wait_for("document.getElementById('at').textContent === 'frame 0 of 5'")
    assert browser.texts("#about")[0].startswith("Episode 1: ")
    assert browser.texts(".row.chosen > span")[0] == "1"
    # In one call: the episode may have ended by the next one.
    play = "document.getElementById('play')"
    assert browser.value(f"{play}.click(), {play}.textContent") == "Pause"
    browser.wait_for("document.getElementById('at').textContent === 'frame 4 of 5'")
    browser.wait_for("document.getElementById('play').textContent === 'Play'")
    captions = browser.texts(".charts figcaption")
    assert "cumulative return" in captions[1]
    browser.fill("#from", "-9.5")
    assert browser.texts(NUMBERS) == ["1", "2", "3"]
    browser.fill("#to", "7")
    assert browser.texts(TEAM) == ["-9", "6"]
    assert browser.texts("#count") == ["2 of 4"]
    browser.fill("#order", "high")
    assert browser.texts(TEAM) == ["6", "-9"]
    browser.fill("#from", "")
    browser.fill("#to", "")
    assert browser.texts(TEAM) == RETURNS[::-1]
    headings = browser.texts("#agents h2")
    assert len(headings) > 1
    browser.fill("#agent", "0")
    assert browser.texts("#agents h2") == headings[:1]
    assert browser.texts("#count") == ["4 of 4"]
    browser.fill("#policy", "0")  # Random actions, in every episode.
    assert browser.texts("#count") == ["4 of 4"]


needs_chromium = pytest.mark.skipif(
    shutil.which(CHROMIUM) is None, reason="needs chromium"
)


@needs_chromium
def test_a_served_page_plays_and_filters(browser: Browser, data: Path) -> None:
    with served(data) as address:
        plays_and_filters(browser, address)


@needs_chromium
def test_a_saved_page_plays(browser: Browser, data: Path, tmp_path: Path) -> None:
    file = tmp_path / "x.html"
    selection = [f"--episode={number}" for number in range(4)]
    run_python(*VIEW, data, "--save", file, *selection, check=True)
    plays_and_filters(browser, file.as_uri())
