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
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from support.commands import error_of, output_of, run
from support.processes import SOON, wait_until
from support.scripts import LIMIT, start_python
from workloads.counting import CountingEnv

from marl_collect import Collector, record
from marl_collect.cli.tasks import find_factory
from marl_collect.cli.view import _episodes
from marl_collect.cli.viewer import server
from marl_collect.cli.viewer.episodes import Episodes
from marl_collect.envs import FrameStack
from marl_collect.models import make_policy
from marl_collect.rendering.pictures import to_picture, to_png
from marl_collect.storage import (
    DatasetDescription,
    RunDescription,
    Writer,
    open_dataset,
)
from marl_collect.storage.recording import EpisodeWriter
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
needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="needs node")


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


def by_parity(seed: int, agents: Sequence[str]) -> dict[str, str]:
    return {agent: "ab"[(seed + i) % 2] for i, agent in enumerate(agents)}


@pytest.fixture(scope="module", params=[True, False], ids=["numbers", "one_hot"])
def varied(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Return episodes of two runs, in which agents have two policies by the seed."""
    folder = tmp_path_factory.mktemp("varied") / "data"
    make = partial(CountingEnv, action_mask=True, categorical_actions=request.param)
    description = DatasetDescription("counting", make().description)
    for seed in range(2):
        policies = {"a": make_policy(make, num_cells=(4,)), "b": None}
        options: Any = {"assign": by_parity, "frames_per_batch": 40, "seed": seed}
        about = RunDescription(seed, {"names": [f"a{seed}", f"b{seed}"]})
        writer = EpisodeWriter(Writer(folder, description, about), 5)
        with Collector(make, policies=policies, **options) as collector, writer:
            while not writer.complete:
                writer.add(collector.next())
    return folder


FRAMES = 4


def ends(flags: Any) -> list[int]:
    """Return the frames in which a flag rises, except for the last frame."""
    before = [False, *flags.tolist()]
    return [t for t, flag in enumerate(before[1:-1]) if flag and not before[t]]


def bits(values: Any) -> str:
    return "".join(str(int(value)) for value in values)


def check_agent(
    agent: dict[str, Any], frames: Any, group: str, row: int, part: slice
) -> None:
    """Compare what is sent of an agent with a part of the frames of an episode."""
    reward = frames["next", group, "reward"][:, row, 0].double()
    assert agent["reward"] == pytest.approx(reward[part].tolist())
    assert agent["return"] == pytest.approx(reward.cumsum(0)[part].tolist())
    assert agent["acts"] == bits(frames[group, "mask"][part, row])
    assert agent["ends"] == [
        {"frame": t, "kind": kind}
        for kind in ("terminated", "truncated")
        for t in ends(frames["next", group, kind][:, row, 0])
    ]
    action = frames[group, "action"][:, row].reshape(len(frames), -1)
    if group == "hunter":
        legal = frames[group, "action_mask"][part, row]
        assert agent["legal"] == [bits(frame) for frame in legal]
        if action.shape[1] > 1:
            action = action.argmax(1, keepdim=True)
    lines = {line["name"]: np.array(line["values"]) for line in agent["lines"]}
    assert lines["action"] == pytest.approx(action[part].numpy().T)
    seen = frames[group, "observation"][part, row]
    assert lines["observation"] == pytest.approx(seen.numpy().T)


def test_a_list_and_parts_of_episodes_are_what_was_recorded(
    varied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("marl_collect.cli.viewer.episodes.FRAMES", FRAMES)
    trajectories, view = open_dataset(varied).trajectories, episodes(varied)
    groups = trajectories.description.environment.groups
    about, chosen = view.about(), [7, 0, 9]
    whole, page = view.listed(0), view.listed(1, chosen)
    assert whole["number"] == list(range(10))
    assert whole["length"] == trajectories.lengths.tolist()
    assert page == {"next": None} | {
        name: [values[number] for number in chosen[1:]]
        for name, values in whole.items()
        if name != "next"
    }
    dead = 0
    for number, begin in ((n, b) for n in range(10) for b in view.parts(n)):
        frames, answer = trajectories[number], view.episode(number, begin)
        part, names = slice(begin, begin + FRAMES), [f"{n}{number // 5}" for n in "ab"]
        assert (answer["run"], answer["length"]) == (number // 5, len(frames))
        assert list(view.parts(number)) == list(range(0, len(frames), FRAMES))
        returns = whole["returns"][number]
        assert whole["team"][number] == pytest.approx(sum(returns))
        agents = zip(about["agents"], answer["agents"], strict=True)
        for position, (known, agent) in enumerate(agents):
            group = known["group"]
            row = groups[group].agents.index(known["name"])
            check_agent(agent, frames, group, row, part)
            total = frames["next", group, "reward"][:, row, 0].double().sum()
            assert returns[position] == pytest.approx(float(total))
            acting = [names[i] for i in frames[group, "policy_id"][:, row]]
            assert agent["policy"] == acting[part]
            label = whole["policies"][number][position]
            assert about["policies"][label] == acting[0]
            dead += len(agent["ends"])
    assert dead


def test_policies_of_runs_are_told_apart(tmp_path: Path) -> None:
    description = DatasetDescription("counting", CountingEnv().description)
    policies: list[Any] = [{"kind": "random"}, {"kind": "mlp", "sha256": "0123456789"}]
    for seed, policy in enumerate(policies):
        about = RunDescription(seed, policy)
        writer = EpisodeWriter(Writer(tmp_path, description, about), 2)
        with (
            Collector(CountingEnv, frames_per_batch=40, seed=seed) as collector,
            writer,
        ):
            while not writer.complete:
                writer.add(collector.next())
    view = episodes(tmp_path)
    assert view.about()["policies"] == ["random actions", "mlp 01234567"]
    assert [set(row) for row in view.listed(0)["policies"]] == [{0}, {0}, {1}, {1}]


def test_returns_of_agents_without_rewards_are_not_known(
    data: Path, viewer: Episodes, tmp_path: Path
) -> None:
    """Those of the others stay theirs."""
    names = [agent["group"] for agent in viewer.about()["agents"]]
    trajectories = open_dataset(data).trajectories
    for lacks in ({"hunter"}, {"hunter", "prey"}):
        chosen = [
            field.key
            for field in trajectories.keys
            if field.key not in {("next", name, "reward") for name in lacks}
        ]
        folder = tmp_path / "-".join(sorted(lacks))
        trajectories.select(*chosen).save(folder)
        other = episodes(folder)
        for mine, theirs in zip(
            other.listed(0)["returns"], viewer.listed(0)["returns"], strict=True
        ):
            for group, one, known in zip(names, mine, theirs, strict=True):
                assert one == (None if group in lacks else known)
        for group, agent, known in zip(
            names,
            other.episode(1, 0)["agents"],
            viewer.episode(1, 0)["agents"],
            strict=True,
        ):
            for name in ("reward", "return"):
                unknown = [None] * len(known[name])
                assert agent[name] == (unknown if group in lacks else known[name])
    with pytest.raises(ValueError, match="There are no rewards in "):
        open_dataset(folder).trajectories.stats()


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
    hosts = {"evil.example": 403, "evil.example:80": 403, "localhost": 200}
    for host, code in hosts.items():
        other = urllib.request.Request(
            with_token(running, "/about"), headers={"Host": host}
        )
        assert status(other)[0] == code


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


@needs_node
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


def test_a_malformed_address_is_answered(running: server.Viewer) -> None:
    with socket.create_connection(address_of(running), SOON) as client:
        client.sendall(b"GET http://[ HTTP/1.1\r\n\r\n")
        assert client.recv(12) == b"HTTP/1.0 403"


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
        (["--save="], "^error: . is a folder: pass the name of a file. $"),
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
    (tmp_path / "a/b/c/d").mkdir(parents=True)
    (tmp_path / "mine").rename(tmp_path / "a/b/c/d/mine")  # Deeper than runs are.
    assert "training runs" not in error_of("view", tmp_path)


def test_a_port_in_use_is_named(data: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        text = error_of("view", data, "--no-browser", f"--port={port}")
    assert f"Port {port}: Address already in use. Choose" in text


@needs_node
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


def shown(page: Path, address: str, *actions: Sequence[Any]) -> list[dict[str, Any]]:
    """Return what a page shows at first and after each action; see the script."""
    script = Path(__file__).with_name("page_in_node.js")
    command = ["node", str(script), str(page), address, json.dumps(actions)]
    node = subprocess.run(command, check=True, capture_output=True, text=True)
    states: list[dict[str, Any]] = json.loads(node.stdout)
    return states


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve the page of a folder; yield its address."""
    with start_python(*VIEW, folder, "--no-browser") as program:
        assert program.stdout is not None
        yield program.stdout.readline().split()[0]
        program.send_signal(signal.SIGINT)
        assert program.wait(LIMIT) == 0


def in_words(value: float) -> str:
    return f"{value:.4g}"


@needs_node
@pytest.mark.parametrize("is_saved", [False, True])
def test_a_page_shows_and_plays_episodes(
    data: Path, tmp_path: Path, is_saved: bool
) -> None:
    page = tmp_path / "x.html"
    actions: list[Any] = [["click", 1], ["play", 3], ["agent", "1"], ["frame", "2"]]
    if is_saved:
        selection = [f"--episode={number}" for number in range(4)]
        output_of("view", data, "--save", page, *selection)
        states = shown(page, "http://nowhere/", *actions)
    else:
        page.write_text(server.page())
        with served(data) as address:
            states = shown(page, address, *actions)
    first, clicked, played, chosen, moved = states
    episodes = open_dataset(data).trajectories
    returns, lengths = episodes.returns.tolist(), episodes.lengths.tolist()
    table = [[str(k), in_words(returns[k]), str(lengths[k])] for k in range(4)]
    assert [row[:3] for row in first["rows"]] == table
    assert (first["chosen"], clicked["chosen"]) == (["0"], ["1"])
    assert first["about"].startswith("Episode 0: ")
    assert clicked["about"].startswith("Episode 1: ")
    assert "The episodes cannot be drawn" in first["pictures"]
    assert clicked["at"] == f"frame 0 of {lengths[1]}"
    assert played["at"] == f"frame {lengths[1] - 1} of {lengths[1]}"
    assert played["play"] == "Play"
    assert played["together"] == 1  # The click that paused it did not wait.
    assert moved["at"] == f"frame 2 of {lengths[1]}"
    names = [
        agent["name"] for agent in Episodes(episodes, lambda: "").about()["agents"]
    ]
    assert [text.partition(" (")[0] for text in first["headings"]] == names
    assert chosen["headings"] == first["headings"][1:2]
    frames = episodes[1]
    group = next(iter(open_dataset(data).description.environment.groups))
    total = frames["next", group, "reward"][:, 1, 0].double().cumsum(0)
    assert chosen["captions"][1] == (f"cumulative return: {in_words(float(total[-1]))}")
    assert moved["captions"][1] == f"cumulative return: {in_words(float(total[2]))}"
    columns = episodes.agent_returns[group][:, 1].tolist()
    assert [row[1] for row in chosen["rows"]] == [in_words(value) for value in columns]


@needs_node
def test_the_frame_that_was_asked_for_last_is_shown(tmp_path: Path) -> None:
    late: Future[dict[str, Any]] = Future()
    agent: dict[str, Any] = {"reward": [0], "return": [0], "lines": [], "ends": []}
    columns = ("length", "terminated", "team", "returns", "policies")

    def episode(number: int, begin: int) -> Any:
        part: dict[str, Any] = {"begin": begin, "length": 6, "frames": 2}
        part |= {"seed": 0, "run": number}
        part |= {"sources": [{"name": "s"}], "agents": [agent], "shared": []}
        return late if begin == 2 else part

    def picture(frame: int, **_: int) -> bytes:
        if frame == 4:  # The part that was asked for before it is sent now.
            late.set_result(episode(0, 0) | {"begin": 2})
        return b""

    about = {"title": "t", "name": "n", "episodes": 1, "frames": 6, "policies": []}
    answers: server.Answers = {
        "/about": lambda: about | {"agents": [{"name": "a", "group": "g"}]},
        "/episodes": lambda begin: (
            {"number": [0], "next": None}
            | {name: [[0]] if name == "returns" else [0] for name in columns}
        ),
        "/episode": episode,
        "/picture": picture,
    }
    page = tmp_path / "x.html"
    page.write_text(server.page())
    with serving(answers) as running:
        _, moved = shown(page, running.address, ["frame", ["2", "4"]])
    assert (moved["at"], moved["message"]) == ("frame 4 of 6", "")


def generated(random: Random) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return episodes of two agents and three policies, and the answers of a server.

    The list arrives in parts.
    """
    listed: list[dict[str, Any]] = [
        {
            "number": number,
            "length": random.randint(1, 9),
            "terminated": random.random() < 0.5,
            "returns": [random.randint(-9, 9), random.randint(-9, 9)],
            "policies": [random.randrange(3), random.randrange(3)],
        }
        for number in random.sample(range(50), random.randint(2, 12))
    ]
    for row in listed:
        row["team"] = sum(row["returns"])
    about = {
        "title": "t",
        "name": "n",
        "episodes": len(listed),
        "frames": 9,
        "agents": [{"name": name, "group": "g"} for name in "ab"],
        "policies": ["p", "q", "r"],
    }
    answers: dict[str, Any] = {"/about": about}
    size = random.randint(1, len(listed))
    for begin in range(0, len(listed), size):
        part = listed[begin : begin + size]
        columns: dict[str, Any] = {name: [r[name] for r in part] for name in part[0]}
        after = begin + size
        columns["next"] = after if after < len(listed) else None
        answers[f"/episodes?begin={begin}"] = columns
    return listed, answers


@needs_node
@pytest.mark.parametrize("seed", range(6))
def test_the_list_is_filtered_and_ordered(seed: int, tmp_path: Path) -> None:
    random = Random(seed)
    listed, answers = generated(random)
    page = tmp_path / "x.html"
    page.write_text(server.page(answers))
    choices = {
        "agent": ["team", "0", "1"],
        "policy": ["any", "0", "1", "2"],
        "from": ["", "-4", "0"],
        "to": ["", "3", "0"],
        "order": ["recorded", "high", "low", "long"],
    }
    values = {name: texts[0] for name, texts in choices.items()}
    actions = []
    for _ in range(30):
        name = random.choice(list(choices))
        actions.append((name, random.choice(choices[name])))
    states = shown(page, "http://nowhere/", *actions)
    for state, (name, text) in zip(states[1:], actions, strict=True):
        values[name] = text
        agent, rows = values["agent"], []
        for row in listed:
            value = row["team"] if agent == "team" else row["returns"][int(agent)]
            acted = (
                row["policies"] if agent == "team" else [row["policies"][int(agent)]]
            )
            low = float(values["from"] or "-inf")
            high = float(values["to"] or "inf")
            if values["policy"] in ("any", *map(str, acted)) and low <= value <= high:
                end = "terminal" if row["terminated"] else "truncated"
                rows.append((value, row["length"], [row["number"], value, end]))
        if values["order"] != "recorded":
            place = 1 if values["order"] == "long" else 0
            rows.sort(key=lambda row: row[place], reverse=values["order"] != "low")
        expected = [
            [str(number), str(value), str(length), end]
            for _, length, (number, value, end) in rows
        ]
        assert state["rows"] == expected, values
        assert state["count"] == f"{len(rows)} of {len(listed)}"
