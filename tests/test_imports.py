"""Imports point down, the scheduler's side is light, and what is public is there."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import daskps

PACKAGE = Path(daskps.__file__).parent

# From the ground up. A module may import from the layers below its own, and from no other of its layer.
LAYERS = [
    ["exceptions", "_late", "_process", "_spec"],
    ["_advice", "_aggregators", "_claims", "_crowding", "_direct", "_emulation", "_environment", "_folds",
     "_handover", "_hooks", "_housekeeping", "_html", "_interpreter", "_leases", "_machine", "_narrow",
     "_packing", "_partitions", "_random", "_server", "_sharedmemory", "_silence", "_standin", "_state",
     "_weights", "_wire", "config", "datasets", "modules", "speedup"],
    ["_blocks", "_casting", "_cluster", "_drawing", "_events", "_findings", "_freezing", "_inputs",
     "_links", "_loading", "_losses", "_messages", "_paused", "_scatter", "_watch", "_workload"],
    ["_facts", "_news", "report"],
    ["_master", "_prediction", "_rounds", "_sources", "_transport"],
    ["_answers", "_buckets", "_connecting", "_joining"],
    ["_generation", "_sync"],
    ["_leaving", "_lending"],
    ["_lookout"],
    ["_scheduler_plugin"],
    ["_probe", "_replica"],
    ["_worker_plugin"],
    ["_epoch", "_plugins"],
    ["_callbacks", "_tasks"],
    ["_launch"],
    ["_check", "_training"],
    ["_preparation"],
    ["classifier"],
    ["__init__"],
    ["_demo", "_trial"],
    ["_experiment"],
    ["_comparison"],
    ["_speedup_plot", "_speedup_table"],
    ["cli"],
    ["__main__"],
]  # fmt: skip
LEVELS = {name: level for level, names in enumerate(LAYERS) for name in names}
MODULES = sorted(path.stem for path in PACKAGE.glob("*.py"))

# Names that may be taken from the package itself without reaching up into its public face.
OF_THE_PACKAGE = {"__version__"}


def imported_from_package(name):
    """The modules of daskps that a module's import statements name, wherever they stand."""
    tree = ast.parse((PACKAGE / f"{name}.py").read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} imports relatively"
            yield from _modules_of(node.module, [alias.name for alias in node.names])
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield from _modules_of(alias.name, [])


def _modules_of(module, names):
    if module == "daskps":
        for name in names:
            yield name if name in LEVELS else "__init__"
    elif module.startswith("daskps."):
        yield module.split(".")[1]


def loaded_by(statement):
    """The top-level packages, and the modules of daskps, that a fresh interpreter has afterwards."""
    code = f"import sys; {statement}; print(*sorted(sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    modules = result.stdout.split()
    return {module.split(".")[0] for module in modules}, {m for m in modules if m.startswith("daskps")}


class TestLayers:
    def test_every_module_has_its_place(self):
        assert sorted(LEVELS) == MODULES

    @pytest.mark.parametrize("name", MODULES)
    def test_imports_point_down(self, name):
        upwards = {
            other
            for other in imported_from_package(name)
            if LEVELS[other] >= LEVELS[name] and not _only_the_version(name, other)
        }
        assert upwards == set()


def _only_the_version(name, other):
    """``import daskps`` is taken for ``daskps.__version__`` and for nothing else."""
    if other != "__init__":
        return False
    tree = ast.parse((PACKAGE / f"{name}.py").read_text(encoding="utf-8"))
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "daskps"
    }
    return used <= OF_THE_PACKAGE


class TestWeight:
    HEAVY = ("torch", "skorch", "sklearn", "scipy", "pandas", "matplotlib")

    def test_the_package_alone_imports_nothing_heavy(self):
        packages, _ = loaded_by("import daskps")
        assert packages.isdisjoint({*self.HEAVY, "distributed"})

    def test_the_schedulers_side_imports_no_torch_and_no_skorch(self):
        packages, modules = loaded_by("import daskps._scheduler_plugin")
        assert packages.isdisjoint({"torch", "skorch", "sklearn", "scipy", "matplotlib"})
        assert modules.isdisjoint({f"daskps.{name}" for name in ("_sync", "_epoch", "classifier")})

    @pytest.mark.parametrize(
        "name",
        [
            "_server",
            "_aggregators",
            "_blocks",
            "_interpreter",
            "_leases",
            "_links",
            "_partitions",
            "_rounds",
            "_sharedmemory",
            "_silence",
            "_spec",
            "_wire",
            "report",
            "speedup",
            "exceptions",
        ],
    )
    def test_state_machines_and_arithmetic_need_numpy_at_most(self, name):
        packages, _ = loaded_by(f"import daskps.{name}")
        assert packages.isdisjoint({*self.HEAVY, "distributed"})


class TestPublicNames:
    @pytest.mark.parametrize("name", daskps.__all__)
    def test_every_one_resolves_and_is_documented(self, name):
        value = getattr(daskps, name)
        assert value is not None
        assert name.startswith("__") or value.__doc__

    def test_they_are_what_dir_shows(self):
        assert set(daskps.__all__) <= set(dir(daskps))
        assert list(daskps.__all__) == sorted(daskps.__all__)

    def test_all_names_can_be_imported_at_once(self):
        _, modules = loaded_by("from daskps import *")
        assert {"daskps.classifier", "daskps.datasets"} <= modules

    def test_unknown_name_is_an_attribute_error_that_names_it(self):
        with pytest.raises(AttributeError, match="no attribute 'Classifier'"):
            daskps.Classifier  # noqa: B018

    def test_classes_know_where_they_are(self):
        for name in set(daskps.__all__) - {"__version__", "datasets"}:
            value = getattr(daskps, name)
            assert getattr(importlib.import_module(value.__module__), name) is value

    def test_package_is_typed(self):
        assert (PACKAGE / "py.typed").exists()
