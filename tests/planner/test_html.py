"""The HTML page: complete in itself, and as a browser shows it."""

import html
import itertools
import re
import shutil
import subprocess
from dataclasses import replace

import pytest

pytest.importorskip("rich")

from parallel_ops.planner import Plan, presets
from parallel_ops.planner.estimate import estimate, simulation
from parallel_ops.planner.export import export
from parallel_ops.planner.pictures.html import page
from parallel_ops.planner.pictures.pipeline_picture import folded, pipeline_svg
from parallel_ops.planner.schedules.schedule import actions, simulate
from support.html_page import Page

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
WIDTHS = (1280, 400)


@pytest.fixture(scope="module")
def document():
    model, cluster = presets.model("llama3-70b"), presets.cluster("h100x64")
    plans = [
        Plan(tp=8, pp=8, zero=1, sequence_parallel=True, schedule="zb-v", virtual_stages=2, global_batch=64),
        Plan(tp=8, pp=4, dp=2, sequence_parallel=True, micro_batch=2, global_batch=64, recompute="selective"),
    ]
    estimates = [estimate(model, cluster, plan) for plan in plans]
    rejected = [("memory", 12, "dp64, b1 x 1: stage 0 needs 1,000.0 GiB of 79.6 <in any case>")]
    return page(estimates, simulation(model, cluster, plans[0]), rejected)


def test_it_is_well_formed_and_loads_nothing(document):
    structure = Page(document)
    assert structure.open == []
    assert structure.loads == []
    assert not re.search(r"https?:|url\(|@import|<script", document)


def test_it_says_whose_times_they_are(document):
    assert "times with the software of megatron-bridge-2025 (Megatron-Bridge" in document


def test_it_says_what_the_estimates_say(document):
    model, cluster = presets.model("llama3-70b"), presets.cluster("h100x64")
    plan = Plan(tp=8, pp=8, zero=1, sequence_parallel=True, schedule="zb-v", virtual_stages=2, global_batch=64)
    best = estimate(model, cluster, plan)
    text = " ".join(Page(document).words)
    for shown in (
        f"{best.step:.3g} s",
        f"{best.mfu:.1%}",
        f"{best.peak_memory.total / 2**30:.1f} of 79.6 GiB",
        "not measurements",
        "stage 0 needs 1,000.0 GiB",
        plan.describe(),
    ):
        assert shown in text
    # The bars of a stage are its parts over the memory of the GPU.
    widths = [
        float(width)
        for width in re.findall(r"width:([\d.]+)%", document.split('class="stages"')[1].split("</div></div>")[0])
    ]
    stage = best.memory[0]
    assert sum(widths) == pytest.approx(100 * stage.total / cluster.gpu.memory, abs=0.1)


def test_the_bubble_is_stated_once_and_figures_have_bands(document):
    text = " ".join(Page(document).words)
    assert text.count("bubble") == 3  # its sentence, and two legends
    assert "The bubble is the time that a rank waits for others" in text
    assert text.count("±") >= 7
    assert "ties within the error" in text  # 6 % slower, of a band of 16 %
    found = estimate(presets.model("llama3-8b"), presets.cluster("h100x8"), Plan(dp=8, zero=3, global_batch=8))
    text = " ".join(Page(page([found, found])).words)
    assert "ties within the error" in text and "2 =" in text


def test_the_configurations_are_beside_the_plan():
    model, cluster = presets.model("llama3-70b"), presets.cluster("h100x64")
    plan = Plan(tp=8, pp=4, dp=2, zero=1, sequence_parallel=True, micro_batch=2, global_batch=64)
    text = page([estimate(model, cluster, plan)])
    assert html.escape(export("megatron", model, cluster, plan)) in text
    assert "with the output embedding, not fused_loss=false. Search for plans that it can run:" in text


def test_a_long_pipeline_is_folded():
    """Both ends are drawn to one scale, each of their passes once; the middle is folded."""
    simulated = simulate(actions("1f1b", 4, 256))
    first, last = folded(simulated)
    assert 0 < first < last < 255
    boxes = re.findall(r"M([\d.]+) ([\d.]+)h([\d.]+)v", pipeline_svg(simulated, "label"))
    top = sorted((float(x), float(width)) for x, y, width in boxes if float(y) == 1)
    assert all(left[0] + left[1] <= right[0] + 0.02 for left, right in itertools.pairwise(top))
    assert top[-1][0] + top[-1][1] <= 1200
    whole = [width for _, width in top[1:20]]
    assert min(whole) > 3  # all 256 would have one each
    assert folded(simulate(actions("1f1b", 4, 8))) == (0, -1)


def test_names_are_escaped():
    model = replace(presets.model("llama3-8b"), name='<script>alert("x")</script>')
    found = estimate(model, presets.cluster("h100x8"), Plan(dp=8, zero=3, global_batch=8))
    assert "<script>" not in page([found])


def test_a_plan_without_a_pipeline_has_no_picture():
    found = estimate(presets.model("llama3-8b"), presets.cluster("h100x8"), Plan(dp=8, zero=3, global_batch=8))
    assert "<svg" not in page([found])


def test_the_picture_has_every_pass_once_and_no_overlap():
    simulated = simulate(actions("1f1b", 4, 6))
    drawn = pipeline_svg(simulated, "label")
    assert drawn.count("z") - drawn.count("font-size") == sum(map(len, simulated.schedule))
    boxes = re.findall(r"M([\d.]+) ([\d.]+)h([\d.]+)v([\d.]+)", drawn)
    rows = {}
    for x, y, width, _ in boxes:
        rows.setdefault(float(y), []).append((float(x), float(x) + float(width)))
    assert len(rows) == 4
    for spans in rows.values():
        spans.sort()
        assert all(left[1] <= right[0] for left, right in itertools.pairwise(spans))


@pytest.fixture(scope="module")
def browse(tmp_path_factory):
    """Opens a page in frames of the given widths; returns the widths of their content and the console's messages."""
    if CHROMIUM is None:
        pytest.skip("no chromium; on Debian and Ubuntu: apt-get install chromium")

    def open_page(text, widths):
        folder = tmp_path_factory.mktemp("chromium")
        # A headless window is at least 500 pixels wide; a frame may be as narrow as a telephone.
        frames = "".join(f'<iframe width="{w}" height="900" srcdoc="{html.escape(text)}"></iframe>' for w in widths)
        measure = """<script>addEventListener("load", () => {
            const roots = [...document.querySelectorAll("iframe")].map(f => f.contentDocument.documentElement);
            document.body.dataset.widths = roots.map(r => r.scrollWidth + "/" + r.clientWidth).join(" ");
        });</script>"""
        (folder / "page.html").write_text(
            f"<!DOCTYPE html><html><body>{frames}{measure}</body></html>", encoding="utf-8"
        )
        # No sandbox: containers run this as root. No network either: whatever is asked of it fails and is logged.
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--enable-logging=stderr"]
        options += ["--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={folder / 'profile'}", "--dump-dom"]
        command = [CHROMIUM, *options, (folder / "page.html").as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        found = re.search(r'data-widths="([^"]*)"', done.stdout)
        assert found, done.stdout[-2000:] + done.stderr[-2000:]
        sizes = [tuple(map(int, size.split("/"))) for size in found[1].split()]
        return sizes, [line for line in done.stderr.splitlines() if "CONSOLE" in line]

    return open_page


def test_a_browser_shows_it_without_errors_or_overflow(document, browse):
    sizes, console = browse(document, WIDTHS)
    assert console == []
    assert len(sizes) == len(WIDTHS)
    for content, window in sizes:
        assert window <= 1280
        assert content <= window


def test_the_browser_check_sees_errors_and_overflow(document, browse):
    wide = document.replace("</body>", '<div style="width:2000px">x</div><script>missing()</script></body>')
    sizes, console = browse(wide, WIDTHS)
    assert any("missing is not defined" in line for line in console)
    assert all(content > window for content, window in sizes)
