"""Functions and classes of modules that workers can or cannot import."""

import os
import textwrap
from pathlib import Path
from typing import Final

import pytest
from support.scripts import run_python

TOOLS: Final = """
import collections, dataclasses, enum, sys, typing

Item = typing.TypeVar("Item")
Number = typing.NewType("Number", int)
Options = typing.ParamSpec("Options")
Shape = typing.TypeVarTuple("Shape")
registry = {}

class Registering(type):
    def __new__(cls, name, bases, attributes, *, number):
        assert number not in registry
        assert "answer" in attributes
        registry[number] = made = super().__new__(cls, name, bases, attributes)
        return made

    def __init__(cls, name, bases, attributes, *, number):
        super().__init__(name, bases, attributes)

class Plugin:
    names = {}

    def __init_subclass__(cls, /, name):
        assert name not in cls.names
        cls.names[name] = cls

class Added(Plugin, name="added"):
    pass

def typed(function: typing.Callable[Options, Item]) -> typing.Callable[Options, Item]:
    def call(*args: Options.args, **kwargs: Options.kwargs) -> Item:
        return function(*args, **kwargs)
    return call

class Colour(enum.Enum):
    RED = 1

class Mistake(Exception):
    pass

class Base(typing.Generic[Item], metaclass=Registering, number=1):
    scale = 3

    def answer(self, value):
        return doubled(value)

@dataclasses.dataclass
class Tool(Base[int], number=2):
    colour: Colour

    @typed
    def answer(self, value: Number, *others: *Shape) -> Number:
        assert (type(self), type(type(self))) == (registry[2], Registering)
        assert Plugin.names == {"added": Added}
        return self.scale * super().answer(value)

def doubled(value):
    return 2 * value

def is_imported():
    module = sys.modules.get(__name__)
    return module is not None and vars(module) is globals()

def main(worker, tool):
    value = worker.receive()
    worker.send((tool.answer(value), tool.colour, is_imported()))
    worker.receive()
    raise Mistake("as it should")
"""
"""A user's module: functions and classes that need each other."""

USE: Final = """
from marl_collect.processes import WorkerPool

def use(tools, start_method="forkserver"):
    tool = tools.Tool(tools.Colour.RED)
    with WorkerPool(tools.main, [tool], start_method=start_method) as pool:
        pool.send(0, 7)
        answer, colour, is_imported = pool.receive()[1]
        assert (answer, colour) == (42, tools.Colour.RED), (answer, colour)
        pool.send(0, None)
        try:
            pool.receive()
        except tools.Mistake as error:
            assert str(error) == "as it should"
    print("imported" if is_imported else "sent")
"""

LOAD: Final = """
import importlib.util, sys

def load(name, path, **options):
    spec = importlib.util.spec_from_file_location(name, path, **options)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
"""

NOT_IMPORTED: Final = {
    "loaded from a file": """
        use(load("tools", "away/tools.py"))
    """,
    "loaded under the name of another module": """
        sys.path.insert(0, "other")  # Has another tools.py.
        use(load("tools", "away/tools.py"))
    """,
    "loaded under the name of a folder": """
        sys.path.insert(0, "folders")  # Has a folder tools.
        use(load("tools", "away/tools.py"))
    """,
    "loaded as a submodule of a package that can be imported": """
        sys.path.insert(0, "parent")
        import package
        use(load("package.tools", "away/tools.py"))
    """,
    "a submodule of a package loaded from a file": """
        folder = ["away/package"]
        load("package", "away/package/__init__.py", submodule_search_locations=folder)
        import package.tools
        use(package.tools)
    """,
    "run by runpy": """
        import runpy
        runpy.run_path("away/running.py")
    """,
    "the script itself": """
        exec(open("away/tools.py").read())
        use(sys.modules["__main__"])
    """,
    "made by hand": """
        import types
        tools = sys.modules["tools"] = types.ModuleType("tools")
        exec(open("away/tools.py").read(), vars(tools))
        use(tools)
    """,
    "in a folder that leaves sys.path between two pools": """
        sys.path.insert(0, "away")
        import tools
        use(tools)
        sys.path.remove("away")
        use(tools)
    """,
    "in a working directory that was left": """
        import os
        sys.path.insert(0, "")
        os.chdir("away")
        import tools
        os.chdir("..")
        use(tools)
    """,
    "a namespace package that has left sys.path": """
        sys.path.insert(0, "away")
        import spaces.tools
        sys.path.remove("away")
        use(spaces.tools)
    """,
    "used as a module": """
        tools = load("tools", "away/tools.py")

        class Use:
            Tool, Colour, Mistake = tools.Tool, tools.Colour, tools.Mistake

            def main(worker, argument):
                assert tools.doubled.__globals__["doubled"] is tools.doubled
                tools.main(worker, argument)

        use(Use)
    """,
    "the script of a child of multiprocessing": """
        import multiprocessing
        exec(open("away/tools.py").read())

        if __name__ == "__mp_main__":
            use(sys.modules["__mp_main__"])
        else:
            context = multiprocessing.get_context("spawn")
            child = context.Process(target=str, daemon=True)
            child.start()
            child.join()
            assert child.exitcode == 0
    """,
    "found by a finder of the script": """
        class Finder:
            @staticmethod
            def find_spec(name, path=None, target=None):
                if name == "tools":
                    return importlib.util.spec_from_file_location(name, "away/tools.py")

        sys.meta_path.append(Finder)
        import tools
        use(tools)
    """,
    "deleted since it was imported": """
        import pathlib
        sys.path.insert(0, "away")
        import tools
        pathlib.Path("away/tools.py").unlink()
        importlib.invalidate_caches()
        use(tools)
    """,
}
IMPORTED: Final = {
    "in a folder of sys.path": """
        sys.path.insert(0, "away")
        import tools
        use(tools)
    """,
    "in a relative folder of sys.path, before a change of directory": """
        import os
        sys.path.insert(0, "away")
        import tools
        os.chdir("other")
        use(tools)
    """,
    "in a folder that is a link": """
        import os
        os.symlink("away", "link")
        sys.path[:0] = ["link", "away"]
        use(load("tools", os.path.abspath("away/tools.py")))
    """,
    "in the working directory": """
        import os
        sys.path.insert(0, "")
        os.chdir("away")
        import tools
        use(tools)
    """,
    "in a package": """
        sys.path.insert(0, "away")
        import package.tools
        use(package.tools)
    """,
    "in a namespace package": """
        sys.path.insert(0, "away")
        import spaces.tools
        use(spaces.tools)
    """,
    "in a zip file": """
        import shutil
        shutil.make_archive("tools", "zip", "away")
        sys.path.insert(0, "tools.zip")
        import tools
        use(tools)
    """,
    "without its source": """
        import pathlib, py_compile
        source = pathlib.Path("away/tools.py")
        py_compile.compile(source, "away/tools.pyc")
        source.unlink()
        sys.path.insert(0, "away")
        import tools
        use(tools)
    """,
    "installed, and another of that name comes first": """
        sys.path[:0] = ["other", "site-packages"]
        import tools  # Of "other".
        tools = load("tools", "site-packages/tools.py")
        sys.path.remove("other")
        use(tools)
    """,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with the user's modules, in folders that Python knows not."""
    files = {
        "use.py": USE + LOAD,
        "other/tools.py": "",
        "folders/tools/data.txt": "",
        "parent/package/__init__.py": "",
        "away/tools.py": TOOLS,
        "away/spaces/tools.py": TOOLS,
        "away/package/__init__.py": "",
        "away/package/tools.py": "from .parts import *\nfrom . import parts\n" + TOOLS,
        "away/package/parts.py": "",
        "away/running.py": TOOLS + "from use import use\nuse(sys.modules[__name__])\n",
        "site-packages/tools.py": TOOLS,
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def run(
    folder: Path,
    body: str,
    start_method: str = "forkserver",
    *,
    interpreter: bool = False,
) -> str:
    script = folder / "script.py"
    use = "use_tools, start_method = use, sys.argv[1]\n"
    use += "def use(tools): use_tools(tools, start_method)\n"
    script.write_text("from use import *\n" + use + textwrap.dedent(body))
    done = run_python(script, start_method, cwd=folder, interpreter=interpreter)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize("way", NOT_IMPORTED)
def test_a_module_that_a_worker_cannot_import_is_sent(folder: Path, way: str) -> None:
    assert run(folder, NOT_IMPORTED[way]) == "sent"


@pytest.mark.parametrize("way", IMPORTED)
def test_a_module_that_a_worker_can_import_is_not_sent(folder: Path, way: str) -> None:
    assert run(folder, IMPORTED[way]) == "imported"


def test_a_spawned_worker_gets_a_module_too(folder: Path) -> None:
    assert run(folder, NOT_IMPORTED["loaded from a file"], "spawn") == "sent"


@pytest.mark.parametrize("mode", ["importlib", "prepend"])
def test_pools_start_in_test_modules_of_the_user(folder: Path, mode: str) -> None:
    """With importlib, pytest loads test modules by path under names of its own."""
    name = sum(map(ord, mode))  # Of no module that a warm process has imported.
    test = folder / "tests" / f"test_{name}.py"
    test.parent.mkdir()
    test.write_text(f"{TOOLS}\n{USE}\ndef test_it():\n    use(sys.modules[__name__])\n")
    done = run_python(
        *("-m", "pytest", "-sq", "-p", "no:cacheprovider", f"--import-mode={mode}"),
        *("--rootdir", folder, test),
        cwd=folder / "other",
        interpreter=True,
    )
    assert done.returncode == 0, done.stdout
    assert ("imported" if mode == "prepend" else "sent") in done.stdout


def test_a_module_of_an_editable_install_is_imported(folder: Path) -> None:
    """Its finder is on sys.meta_path of every process of this interpreter."""
    site = folder / "site-packages"
    (site / "editable_finder.py").write_text(
        f"""
import importlib.util, sys

class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "tools":
            file = {str(folder / "away" / "tools.py")!r}
            return importlib.util.spec_from_file_location(name, file)

def install():
    sys.meta_path.append(Finder)
"""
    )
    (site / "tools.py").unlink()
    # As the line of a .pth file, in every process.
    (folder / "sitecustomize.py").write_text(
        f"import sys\nsys.path.append({str(site)!r})\n"
        "import editable_finder\neditable_finder.install()\n"
    )
    (folder / "script.py").write_text("import use, tools\nuse.use(tools)\n")
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    done = run_python("script.py", cwd=folder, env=environment, interpreter=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["imported"]


def test_what_libraries_import_is_sent_by_name(folder: Path) -> None:
    """They change sys.path, make modules by hand, and give modules other names."""
    body = """
        import cloudpickle, contextlib, types

        for name in ("torch", "ray", "torchrl.envs", "gymnasium", "pandas"):
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
        from marl_collect.processes import pickling

        modules = [m for m in sys.modules.values() if type(m) is types.ModuleType]
        for module in modules:
            if getattr(module, "__file__", None):
                pickling.dumps(module)
        print(len(modules) > 900, [*cloudpickle.list_registry_pickle_by_value()])
    """
    assert run(folder, body, interpreter=True) == "True []"


def test_the_finders_are_asked_once(folder: Path) -> None:
    body = """
        from marl_collect.processes import pickling

        asked = []

        class Finder:
            def find_spec(self, name, path=None, target=None):
                asked.append(name)

        tools = load("tools", "away/tools.py")
        Finder.__module__ = "json"  # As if it were installed.
        sys.meta_path.insert(0, Finder())
        for _ in range(3):
            pickling.dumps([tools.main, tools.Tool, tools.doubled])
        print(asked.count("tools"))
    """
    assert run(folder, body) == "1"
