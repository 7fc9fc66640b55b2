"""Tables of measured kernels: reading them, choosing by them, and `kbit tune`, here with made-up times."""

from __future__ import annotations

import importlib
import json
import shutil
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import kbit
from kbit.backends.cuda import driver, operands, preference, products, stream, tables, wgmma, wgmma_config
from kbit.backends.cuda.compiler import CSRC
from kbit.backends.cuda.driver import DeviceLimits
from kbit.backends.cuda.tables import Problem, TableError
from kbit.backends.cuda.weight_shape import WeightShape
from kbit.backends.cuda.wgmma_config import Tiling
from kbit.bench import shapes, tune
from kbit.bench.tune_record import Record
from kbit.bench.tune_sources import cxx_code, python_code, sources_digest
from kbit.cli import app

H200 = DeviceLimits(132, 227 * 1024, "90a")
A100 = DeviceLimits(108, 163 * 1024, "80")
PROVENANCE = {"gpu": "NVIDIA H200", "driver": "1", "cuda": "13.0", "torch": "2", "sources": "ab", "date": "d"}
PROBLEM = Problem(4096, 4096, 4, False, "fp16")
WEIGHT = PROBLEM.weight_on(H200)


@pytest.fixture(autouse=True)
def _no_forcing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("KBIT_KERNEL", raising=False)
    monkeypatch.setenv("KBIT_CACHE", str(tmp_path / "cache"))


def item(
    m: int = 64,
    kernel: str = "wgmma",
    tokens: int = 32,
    cluster: int = 2,
    flags: dict[str, object] | None = None,
    **changes: object,
) -> dict:
    plan = {"tokens": tokens, "cluster": cluster, **(flags or {})} if kernel == "wgmma" else {}
    row = asdict(PROBLEM) | {"m": m, "kernel": kernel, "plan": plan, "us": 5.0}
    return row | {"runner_up": "cublas", "runner_up_us": 9.0} | changes


def content(*rows: object, **changes) -> bytes:
    head = {"version": 1, "device": H200._asdict(), "provenance": PROVENANCE, "rows": list(rows)}
    return json.dumps(head | changes).encode()


def table(*rows: dict, file: str = "nvidia-h200.json", device: DeviceLimits = H200) -> tables.Table:
    return tables.parse(content(*rows, device=device._asdict()), file)


# -- what the package has ------------------------------------------------------------------------------------


def assert_all_legal(found: tables.Table) -> None:
    for problem, rows in found.rows.items():
        weight = problem.weight_on(found.device)
        for row in rows:
            choice = preference.decide(row.m, tables.DTYPES[problem.dtype], weight, (found,))
            assert choice.row == row, (problem, row)
            assert row.kernel == choice.kernel
            assert row.runner_up_us is None or row.us <= row.runner_up_us, (problem, row)


def test_every_shipped_row_is_legal_and_no_loser() -> None:
    for file in tables.SHIPPED.glob("*.json"):
        found = tables.load(file)
        assert found is not None
        assert found.rows
        assert_all_legal(found)
        provenance = json.loads(file.read_text())["provenance"]
        assert file.stem == tables.slug(provenance["gpu"])
        assert {"commit", "driver", "cuda", "torch", "date", "sources"} <= set(provenance)


def test_tables_are_in_the_folder_that_wheels_take() -> None:
    assert tables.SHIPPED.parent == Path(kbit.__file__).parent / "backends" / "cuda"


# -- lookup --------------------------------------------------------------------------------------------------


def test_a_row_serves_its_tokens_and_down_to_half() -> None:
    known = (table(item(64, kernel="cublas"), item(256, kernel="cublas")),)
    rows = {}
    for m in (31, 32, 33, 64, 65, 127, 128, 200, 256, 257):
        choice = preference.decide(m, torch.float16, WEIGHT, known)
        assert choice == preference.decide(m, torch.float16, WEIGHT, known)
        rows[m] = choice.row.m if choice.row else None
    none = dict.fromkeys((31, 65, 127, 257))
    assert rows == none | dict.fromkeys((32, 33, 64), 64) | dict.fromkeys((128, 200, 256), 256)


def behind(tiling: Tiling, m: int) -> float:
    costs = wgmma.candidates(m, WEIGHT)
    return costs[wgmma.plan_of(tiling, m, WEIGHT)] / min(costs.values())


def fitted(tiling: Tiling, m: int, measured: int, competed: Sequence[int]) -> Tiling:
    """Fewest tokens for as many blocks of m, but none that lost for `measured` tokens."""
    kind = (one.tiling for one in wgmma.candidates(m, WEIGHT))
    found = [one for one in kind if one._replace(tokens=tiling.tokens) == tiling]
    as_many = [one for one in found if -(-m // one.tokens) == -(-m // tiling.tokens)]
    lost = [size for size in competed if -(-measured // size) == -(-measured // tiling.tokens)]
    return min(one for one in as_many if one == tiling or one.tokens not in lost)


@pytest.mark.parametrize("tiling", [Tiling(128, 1), Tiling(64, 1), Tiling(128, 2)], ids=str)
def test_for_fewer_tokens_a_launch_may_fall_behind_by_a_tenth(tiling: Tiling) -> None:
    """Of what it was when it was measured: it may well have been the fastest, and not so by estimate."""
    known = (table(item(256, tokens=tiling.tokens, cluster=tiling.cluster)),)
    kept = {}
    for m in range(128, 257):
        choice = preference.decide(m, torch.float16, WEIGHT, known)
        mine = fitted(tiling, m, 256, wgmma_config.TOKENS)
        kept[m] = behind(mine, m) <= 1.1 * behind(tiling, 256)
        assert choice.plan == (wgmma.plan_of(mine, m, WEIGHT) if kept[m] else wgmma.plan(m, WEIGHT))
        assert (choice.row is not None) == kept[m]  # its time is said only of its launch
    assert kept[256]
    assert not all(kept.values())


def test_a_launch_takes_no_more_tokens_than_its_number_of_blocks_needs() -> None:
    known = (table(item(96, tokens=96, cluster=1)),)
    tokens = {m: preference.decide(m, torch.float16, WEIGHT, known).plan.tiling.tokens for m in range(65, 97)}
    assert [m for m, size in tokens.items() if size == 80] == list(range(65, 81))
    assert [m for m, size in tokens.items() if size == 88] == list(range(81, 89))
    assert [m for m, size in tokens.items() if size == 96] == list(range(89, 97))


@pytest.mark.parametrize(("competed", "tokens"), [([64, 96], 88), ([64, 88, 96], 96), (None, 96)])
def test_what_competed_and_lost_is_not_taken(competed: list[int] | None, tokens: int) -> None:
    """256 tokens are three blocks of 96, and of 88."""
    text = content(item(256, tokens=96, cluster=1), tokens=competed)
    choice = preference.decide(256, torch.float16, WEIGHT, (tables.parse(text, "nvidia-h200.json"),))
    assert choice.row is not None
    assert choice.plan.tiling == Tiling(tokens, 1)


def test_a_row_tells_narrow_steps_from_others() -> None:
    for narrow, columns in ((False, 128), (True, 64)):
        row = item(64, tokens=64, cluster=1)
        row["plan"] |= {"rows": 64, "narrow": narrow}
        plan = preference.decide(64, torch.float16, WEIGHT, (table(row),)).plan
        assert plan.tiling == Tiling(64, 1, 64, narrow=narrow)
        assert wgmma_config.of_tiling(4, plan.tiling, plan.teams, False, False).columns == columns


def test_a_launch_is_laid_out_for_the_tokens_at_hand() -> None:
    known = (table(item(512, tokens=128, cluster=1)),)
    few, many = (preference.decide(m, torch.float16, WEIGHT, known).plan for m in (500, 512))
    assert few == many == wgmma.plan_of(Tiling(128, 1), 512, WEIGHT)
    # Three tiles of 128 tokens, one of them for a single token.
    assert preference.decide(257, torch.float16, WEIGHT, known).plan == wgmma.plan(257, WEIGHT)


def test_the_other_dtype_and_nothing_else_shares_a_row() -> None:
    known = (table(item()),)
    assert preference.decide(64, torch.bfloat16, WEIGHT, known).row is not None
    assert preference.decide(64, torch.float32, WEIGHT, known).kernel == "cublas"
    for size in (
        (4096, 4096, 3, False),
        (4096, 2048, 4, False),
        (2048, 4096, 4, False),
        (4096, 4096, 4, True),
    ):
        assert preference.decide(64, torch.float16, WeightShape(*size, H200), known).row is None
    both = (table(item(), item(dtype="bf16", kernel="cublas")),)
    assert preference.decide(64, torch.bfloat16, WEIGHT, both).kernel == "cublas"


def test_the_first_table_that_has_a_problem_counts() -> None:
    mine, shipped = table(item(kernel="cublas")), table(item(), item(8, kernel="cublas"))
    assert preference.decide(64, torch.float16, WEIGHT, (mine, shipped)).kernel == "cublas"
    assert preference.decide(64, torch.float16, WEIGHT, (shipped, mine)).kernel == "wgmma"
    assert preference.decide(8, torch.float16, WEIGHT, (mine, shipped)).kernel == "cublas"


@pytest.mark.parametrize(
    ("row", "m", "kernel"),
    [
        (item(128, kernel="stream"), 128, "wgmma"),  # stream takes 64 at most
        (item(64, tokens=56), 64, "wgmma"),  # no such launch
        (item(8192, tokens=256, cluster=9), 8192, "wgmma"),  # no such cluster
        (item(8192, tokens=256, flags={"multicast": True}), 8192, "wgmma"),  # pairs do not split K
    ],
)
def test_an_illegal_row_is_passed_over(row: dict, m: int, kernel: str) -> None:
    choice = preference.decide(m, torch.float16, WEIGHT, (table(row),))
    assert (choice.row, choice.kernel) == (None, kernel)
    assert choice.plan == wgmma.plan(m, WEIGHT)


def test_wgmma_of_a_table_is_not_taken_where_there_is_none() -> None:
    choice = preference.decide(64, torch.float16, PROBLEM.weight_on(A100), (table(item(), device=A100),))
    assert (choice.kernel, choice.row) == ("mma", None)


def test_forcing_outranks_tables_and_uses_their_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    known = (table(item(tokens=64, cluster=1)),)
    monkeypatch.setenv("KBIT_KERNEL", "wgmma")
    choice = preference.decide(64, torch.float16, WEIGHT, known)
    assert choice.forced
    assert choice.plan == wgmma.plan_of(Tiling(64, 1), 64, WEIGHT)
    monkeypatch.setenv("KBIT_KERNEL", "cublas")
    choice = preference.decide(64, torch.float16, WEIGHT, known)
    assert (choice.kernel, choice.row, choice.why) == ("cublas", None, "forced by KBIT_KERNEL")


def test_without_tables_the_estimate_decides() -> None:
    for m in (1, 17, 64, 300, 8192):
        choice = preference.decide(m, torch.float16, WEIGHT)
        assert choice.kernel == preference.choose(m, torch.float16, 4096, 4096, False, "90a")
        assert choice.why == "by estimate"


def test_reasons_name_the_table() -> None:
    words = preference.reasons(60, torch.float16, WEIGHT, (table(item(), file="/x/nvidia-h200.json"),))
    start = "taken by table nvidia-h200.json, measured 5 us (cublas 9 us) at M=64: "
    assert words["wgmma"].startswith(start), words
    assert words["cublas"] == "could take it"
    assert "taken by estimate: " in preference.reasons(60, torch.float16, WEIGHT)["wgmma"]


def test_explain_names_the_table_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("kbit.dispatch.explain")
    monkeypatch.setattr(driver, "device_limits", lambda index: H200)
    q = kbit.quantize(torch.randn(64, 4096), 4, search=False)
    for known, words in (((table(item(out_features=64)),), "by table nvidia-h200.json"), ((), "by estimate")):
        monkeypatch.setattr(tables, "for_device", lambda index, known=known: known)
        lines = module._cuda_lines(64, torch.float16, q, False)
        assert any(line.startswith(f"  wgmma: taken {words}") for line in lines), lines


# -- files ---------------------------------------------------------------------------------------------------


def test_names_of_files() -> None:
    assert tables.slug("NVIDIA H200") == "nvidia-h200"
    assert tables.slug("NVIDIA GeForce RTX 4090 D") == "nvidia-geforce-rtx-4090-d"
    assert tables.slug("../../etc/passwd") == "etc-passwd"
    assert tables.slug("///") == "gpu"


def test_the_users_table_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(driver, "device_name", lambda index: "NVIDIA H200")
    monkeypatch.setattr(driver, "device_limits", lambda index: H200)
    monkeypatch.setattr(tables, "SHIPPED", tmp_path / "shipped")
    uncached = tables.for_device.__wrapped__
    assert uncached(0) == ()
    for folder in (tmp_path / "shipped", tmp_path / "cache" / "tables"):
        folder.mkdir(parents=True)
        (folder / "nvidia-h200.json").write_bytes(content(item()))
    assert [Path(found.file).parent.name for found in uncached(0)] == ["tables", "shipped"]
    monkeypatch.setattr(driver, "device_name", lambda index: "NVIDIA H100 PCIe")
    assert uncached(0) == ()


DAMAGED = [
    (b"", "it is not JSON"),
    (b"\xff\xfe\x00", "it is not JSON"),
    (b"[" * 100_000, "it is not JSON"),
    (b"[]", "the file must be an object, got list"),
    (content(item(us=float("nan"))), "NaN is not JSON"),
    (content(version=2), "version must be 1, got 2"),
    (content(device=None), "device must be an object"),
    (content(device={"multiprocessors": "132"}), "multiprocessors must be a whole number"),
    (content(rows={}), "rows must be a list, got dict"),
    (content(tokens=64), "tokens must be a list, got int"),
    (content(tokens=[64, "96"]), "tokens must be a whole number"),
    (content(7), "row 0: it must be an object, got int"),
    (content(item(), item()), "row 1: there is one of"),
    (content(item(bits=6)), "row 0: bits must be one of 2, 3, 4, 5, got 6"),
    (content(item(bits=True)), "row 0: bits must be a whole number"),
    (content(item(dtype="fp8")), "dtype must be one of fp16, bf16, got 'fp8'"),
    (content(item(kernel="rm -rf")), "kernel must be one of stream, wgmma, mma, cublas"),
    (content(item(gated=1)), "gated must be true or false"),
    (content(item(m=0)), "m must be a whole number"),
    (content(item(m=2**80)), "m must be a whole number"),
    (content(item(tokens="64")), "tokens must be a whole number"),
    (content(item(flags={"multicast": 1})), "multicast must be true or false"),
    (content(item(flags={"narrow": None})), "narrow must be true or false"),
    (content(item(us=0)), "us must be a positive number"),
    (content(item(us=10.0)), "wgmma with 10.0 us is slower than its runner-up with 9.0"),
    (content(item(runner_up=3)), "runner_up must be a string"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_file_is_one_warning(damage: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "nvidia-h200.json"
    file.write_bytes(damage)
    with pytest.warns(UserWarning, match="kbit estimates which CUDA kernel is fastest") as caught:
        assert tables.load_all((file,), H200) == ()
    assert len(caught) == 1
    assert message in str(caught[0].message)
    assert str(file) in str(caught[0].message)


def test_a_folder_another_gpu_and_too_large_a_file_are_warnings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = tmp_path / "good.json"
    good.write_bytes(content(item()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(tables.load_all((good, tmp_path / "absent.json"), H200)) == 1
    with pytest.warns(UserWarning, match="it was made on DeviceLimits"):
        assert tables.load_all((good,), A100) == ()
    with pytest.warns(UserWarning, match="not a file of at most"):
        assert tables.load_all((tmp_path,), H200) == ()
    monkeypatch.setattr(tables, "_MOST_BYTES", 10)
    with pytest.raises(TableError, match="not a file of at most"):
        tables.load(good)


# -- measuring -----------------------------------------------------------------------------------------------


class MadeUpTimer:
    """Times by the label's hash; counts, and may stop like a user's Ctrl-C."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.calls, self.stop_after = [], stop_after

    def __call__(self, problem, m, found):
        if len(self.calls) == self.stop_after:
            raise KeyboardInterrupt
        self.calls.append((problem, m))
        return {label: 1.0 + sum(map(ord, f"{label} {m}")) % 17 for label in found}


def tasks() -> list[tuple[Problem, int]]:
    chosen = tune.problems(shapes.select(["q", "kv"]), (3, 4), ("fp16",), gated=False)
    return [(problem, m) for problem in chosen for m in (1, 64, 4096)]


def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    file, whole = tmp_path / "t" / "a.json", tmp_path / "b.json"
    first = MadeUpTimer(stop_after=5)
    with pytest.raises(KeyboardInterrupt):
        tune.tune(tasks(), Record(file, H200, PROVENANCE), first)
    assert len(first.calls) == 5
    record = Record(file, H200, PROVENANCE | {"date": "later"})
    assert len(record) == 5
    second, seen = MadeUpTimer(), []
    assert tune.tune(tasks(), record, second, on_done=lambda *task: seen.append(task))
    assert first.calls + second.calls == tasks() == seen
    tune.tune(tasks(), Record(whole, H200, PROVENANCE | {"date": "later"}), MadeUpTimer())
    assert file.read_bytes() == whole.read_bytes()
    assert [path.name for path in file.parent.iterdir()] == ["a.json"]
    found = tables.load(file)
    assert found is not None
    assert_all_legal(found)
    third = MadeUpTimer()
    assert tune.tune(tasks(), Record(file, H200, PROVENANCE), third)
    assert not third.calls


def test_a_budget_stops_before_a_problem_and_keeps_what_is_done(tmp_path: Path) -> None:
    file, timer = tmp_path / "a.json", MadeUpTimer()
    record = Record(file, H200, PROVENANCE)
    assert not tune.tune(tasks(), record, timer, seconds=3, clock=lambda: float(len(timer.calls)))
    assert len(timer.calls) == 3
    assert len(Record(file, H200, PROVENANCE)) == 3


def test_a_record_says_what_it_was_measured_with(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    tune.tune(tasks(), Record(file, H200, PROVENANCE), MadeUpTimer())
    written = json.loads(file.read_text())
    assert written["provenance"] == PROVENANCE
    assert written["device"] == H200._asdict()
    assert set(written["rows"][0]) == {
        *asdict(PROBLEM),
        "m",
        "kernel",
        "plan",
        "us",
        "runner_up",
        "runner_up_us",
    }
    with pytest.raises(ValueError, match="measured with driver 1, this is 2. --fresh starts over"):
        Record(file, H200, PROVENANCE | {"driver": "2"})
    with pytest.raises(ValueError, match="measured with device"):
        Record(file, A100, PROVENANCE)
    assert len(Record(file, H200, PROVENANCE | {"driver": "2"}, fresh=True)) == 0
    file.write_text("{")
    with pytest.raises(ValueError, match="cannot be gone on with: it is not JSON"):
        Record(file, H200, PROVENANCE)


def near_best(m: int, weight: WeightShape) -> set[tuple[int, bool, bool]]:
    """The kinds of launch of which one is worth a measurement."""
    if weight.device.arch != wgmma.ARCH:
        return set()
    costs = wgmma.candidates(m, weight)
    enough = next((tokens for tokens in wgmma_config.TOKENS if tokens >= m), wgmma_config.TOKENS[-1])
    fitting = {plan: cost for plan, cost in costs.items() if plan.tiling.tokens <= enough}
    most = tune.ESTIMATE_RANGE * min(fitting.values())
    return {plan.tiling.kind for plan, cost in fitting.items() if cost <= most}


def test_estimates_are_near_what_was_measured() -> None:
    """Where the estimate's choice is among the two launches whose times the shipped table has."""
    table = tables.load(tables.SHIPPED / "nvidia-h200.json")
    assert table is not None
    losses, wins = [], 0
    for problem, rows in table.rows.items():
        weight = problem.weight_on(table.device)
        for row in rows:
            if row.tiling is None:
                continue
            best = wgmma.plan(row.m, weight).tiling
            wins += best == row.tiling
            if f"wgmma {best}" == row.runner_up:
                losses.append(row.runner_up_us / row.us)
    assert wins > 0.65 * (wins + len(losses))
    assert sum(losses) < 1.05 * len(losses)
    assert max(losses) < 1.15


@pytest.mark.parametrize("device", [H200, A100], ids=lambda device: device.arch)
def test_candidates_are_legal_and_hold_the_estimates_choice(device: DeviceLimits) -> None:
    chosen = tune.problems(shapes.DENSE, (2, 5), ("bf16",), gated=True)
    assert any(problem.gated for problem in chosen)
    for problem in chosen:
        dtype = tables.DTYPES[problem.dtype]
        weight = problem.weight_on(device)
        for m in tune.ROWS:
            found = tune.candidates(m, problem, device)
            refusals = preference.refusals_of(m, dtype, problem.out_features, problem.gated, device.arch)
            assert all(refusals[choice.kernel] is None for choice in found.values())
            kernels = {choice.kernel for choice in found.values()}
            assert preference.decide(m, dtype, weight).kernel in kernels
            assert "cublas" in kernels
            plans = [choice.plan for choice in found.values() if choice.plan]
            kinds = Counter(plan.tiling.kind for plan in plans)
            assert all(count <= tune.MOST_PLANS for count in kinds.values())
            assert kinds.keys() == near_best(m, weight)
            assert [wgmma.plan_of(plan.tiling, m, weight) for plan in plans] == plans
            assert not plans or wgmma.plan(m, weight) in plans


def test_what_is_compiled_beforehand_is_what_candidates_launch() -> None:
    (problem,) = tune.problems(shapes.select(["kv"]), (4,), ("fp16",), gated=False)
    names = {spec.name for spec, _ in tune.specs([(problem, 1), (problem, 24)], H200)}
    for m in (1, 16, 8):
        plan = stream.plan(m, problem.weight_on(H200))
        assert plan.config.spec(4, torch.float16, plan.tokens).name in names
    assert any(name.startswith("wgmma[") for name in names)
    assert set(operands.DTYPES) == set(tables.DTYPES.values())


@pytest.mark.parametrize(
    ("file", "old", "new", "same"),
    [
        ("stream.cuh", "\n", "  // made up\n", True),
        ("wgmma.cu", "\n", "\n/* made\nup */\n", True),
        ("nvfp4_gemm.cu", "__syncthreads()", "__syncwarp()", True),  # does not compete
        ("decode.cuh", "0x", "1 + 0x", False),
        ("dequantize_tiled.cu", "__syncthreads()", "__syncwarp()", False),
    ],
)
def test_the_digest_is_of_what_compilers_see(
    file: str, old: str, new: str, same: bool, tmp_path: Path
) -> None:
    csrc = shutil.copytree(CSRC, tmp_path / "csrc")
    text = (csrc / file).read_text()
    assert old in text
    (csrc / file).write_text(text.replace(old, new, 1))
    assert (sources_digest(csrc) == sources_digest()) is same


def test_comments_are_no_code() -> None:
    assert cxx_code('a = "//b" "\\"/*";  // c "d"\n/* e\n"f" */ g') == 'a = "//b" "\\"/*"; g'
    code = '''"""A."""\n\ndef f():\n    """B.\n    """\n    # C.\n    return "# D"  # E\n'''
    assert python_code(code) == 'def f():\n    return "# D"'


def test_the_command_asks_for_a_gpu_and_for_known_shapes() -> None:
    if not torch.cuda.is_available():
        result = CliRunner().invoke(app, ["tune"])
        assert isinstance(result.exception, ValueError)
        assert "kbit tune needs an NVIDIA GPU" in str(result.exception)
    result = CliRunner().invoke(app, ["tune", "--shape", "nothing"])
    assert "unknown shape nothing" in str(result.exception)


# -- on a GPU ------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_the_command_measures_and_its_table_is_used(tmp_path: Path) -> None:
    file = tmp_path / "t.json"
    arguments = ["tune", "--shape", "kv", "--bits", "4", "-m", "1,64,256", "--gated", "--out", str(file)]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    limits = driver.device_limits(torch.cuda.current_device())
    (found,) = tables.load_all((file,), limits)
    assert_all_legal(found)
    assert sum(len(rows) for rows in found.rows.values()) == 3
    before = file.read_bytes()
    CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert file.read_bytes() == before


@pytest.mark.gpu
def test_every_candidate_computes_the_product() -> None:
    (problem,) = tune.problems(shapes.select(["kv"]), (4,), ("bf16",), gated=False)
    limits = driver.device_limits(torch.cuda.current_device())
    q = kbit.quantize(torch.randn(512, 2048, device="cuda"), bits=4, search=False).tile()
    for m in (1, 24, 64, 300):
        x = torch.randn(m, 2048, device="cuda", dtype=torch.bfloat16)
        expected = x.double() @ kbit.dequantize(q, torch.bfloat16).double().T
        for label, choice in tune.candidates(m, problem, limits).items():
            out = torch.full((m, 512), torch.nan, device="cuda", dtype=torch.bfloat16)
            products.launch(choice, x, q.tiled, q.codebook, q.scale, None, 512, 2048, False, out)
            assert (out.double() - expected).norm() <= 0.005 * expected.norm(), (label, m)
