import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# For `import benchmarks`. Last, so that an installed parallel_ops is not shadowed by the source tree.
sys.path.append(str(Path(__file__).parents[1]))

# The same examples on every run; no deadline, since machines are shared and first calls compile.
settings.register_profile(
    "parallel_ops",
    deadline=None,
    derandomize=True,
    max_examples=40,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.load_profile("parallel_ops")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--executor",
        choices=("quick", "full"),
        default="quick",
        help="tests that execute the PTX of kernels: as compiled for sm_90, or for sm_80, sm_90 and sm_100",
    )
    parser.addoption(
        "--kernels",
        choices=("smoke", "all"),
        default="smoke",
        help="tests that compile or execute Triton kernels without a GPU: one case of each test, or all of them",
    )
    parser.addoption("--elastic", action="store_true", help="a run whose nodes go and come: a minute")
    parser.addoption(
        "--compile-wheels", action="store_true", help="tests of the wheel compile its extensions anew, twice"
    )
    parser.addoption(
        "--arm", default=None, metavar="COMMAND", help="CPU kernels run in this program: see `make test-arm`"
    )
    parser.addoption("--trials", type=int, default=None, help="random cases of each search; a small number by default")
    parser.addoption("--plans", type=int, default=None, help="random settings that are trained; a few by default")


def pytest_configure(config: pytest.Config) -> None:
    if command := config.getoption("--arm"):
        from support import arm

        server = config.stash[arm.Server.key] = arm.Server(command)
        library = server.install()
        config.add_cleanup(lambda: (library._destroy(), server.close()))


@pytest.fixture
def trials(pytestconfig: pytest.Config) -> int | None:
    """Random cases of each search, if the command line says how many."""
    count: int | None = pytestconfig.getoption("--trials")
    return count


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves the smoke of the kernel tests: of each test that is not marked ``smoke=False`` one case.

    In bfloat16 and for sm_90, where it has such a case. So each kernel is compiled and executed, and each planted bug,
    which is a test of its own, is found.
    """
    if config.getoption("--kernels") == "all":
        return
    cases: dict[str, list[pytest.Item]] = {}
    left_out = set()
    for item in items:
        marker = item.get_closest_marker("executed") or item.get_closest_marker("aot")
        if marker is not None:
            left_out.add(id(item))
            if marker.kwargs.get("smoke", True):
                cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left_out -= {
        id(max(group, key=lambda item: ("bfloat16" in item.name, "90" in item.name))) for group in cases.values()
    }
    config.hook.pytest_deselected(items=[item for item in items if id(item) in left_out])
    items[:] = [item for item in items if id(item) not in left_out]


def pytest_collection_finish(session: pytest.Session) -> None:
    """What is imported stays; without this, each full collection of garbage walks through all of it."""
    gc.collect()
    gc.freeze()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if any(m.name == "executed" for m in metafunc.definition.iter_markers()):
        full = metafunc.config.getoption("--executor") == "full"
        capabilities = (80, 90, 100) if full else (90,)
        metafunc.parametrize("_kernels_are_executed", capabilities, indirect=True, ids=lambda c: f"on sm_{c}")


@pytest.fixture(autouse=True)
def _kernels_are_executed(request: pytest.FixtureRequest) -> Iterator[None]:
    """In tests with the marker, ops launch their kernels on CPU tensors, and the kernels' PTX is executed."""
    if not hasattr(request, "param"):
        yield
        return
    from ptx.execution import executed, ops_launch_kernels

    with ops_launch_kernels(), executed(request.param):
        yield
