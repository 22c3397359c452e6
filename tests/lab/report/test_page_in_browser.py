"""report.html in headless Chromium, where one is installed: nothing fails to load, nothing is said on the console."""

import html
import json
import re
import shutil
import subprocess

import pytest
from lgelu_lab.report.write import write_report

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")]

SOFT = [{"a": 1.5, "b": 1.2}, {"a": 1.6, "b": 1.4}, {"a": 1.7, "b": 1.5}]

# The page itself has no script, and its policy allows none: a copy gets this one, and a policy that lets it run.
CHECK = """<script>addEventListener("load", () => {
  const wide = document.documentElement;
  const found = {
    images: [...document.images].map((image) => [image.complete, image.naturalWidth]),
    overflow: wide.scrollWidth - wide.clientWidth,
    resources: performance.getEntriesByType("resource").map(({name}) => name).filter((n) => !n.startsWith("data:")),
    tables: document.querySelectorAll(".scroll table").length,
  };
  const note = document.createElement("pre");
  note.id = "found";
  note.textContent = JSON.stringify(found);
  document.body.append(note);
});</script>"""


@pytest.fixture(scope="module")
def page(record_of, data_of, tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    runs = [record_of(seed=seed) for seed in range(2)]
    runs += [record_of(activation="lambda_gelu", init_mode=m, hardness=SOFT) for m in ("uniform", "increasing")]
    point = record_of(activation="lambda_gelu", hardness=SOFT, benchmark="mlp-fmnist", name="grid/mlp-fmnist/x-seed0")
    point.config.update(temperature=0.3, hardness_lr_multiplier=6.0)
    write_report(data_of([*runs, point, record_of(activation="mish")]), folder)
    return folder / "report.html"


def browse(path, profile, width=1200):
    """The page's DOM after loading, and what Chromium logged of its console."""
    command = [
        *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
        *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
        *(f"--user-data-dir={profile}", f"--window-size={width},2000", "--enable-logging=stderr", "--v=0"),
        *("--virtual-time-budget=10000", "--dump-dom", path.as_uri()),
    ]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert finished.returncode == 0, finished.stderr[-2000:]
    return finished.stdout, [line for line in finished.stderr.splitlines() if ":CONSOLE" in line]


def checked(page, folder, width):
    copy = folder / "copy.html"
    text = page.read_text(encoding="utf-8")
    with_script = text.replace("default-src 'none';", "default-src 'none'; script-src 'unsafe-inline';")
    assert with_script != text
    copy.write_text(with_script.replace("</body>", CHECK + "</body>"), encoding="utf-8")
    dom, console = browse(copy, folder / "profile", width)
    found = re.search(r'<pre id="found">(.*?)</pre>', dom, flags=re.DOTALL)
    assert found, "the check did not run"
    return json.loads(html.unescape(found[1])), console


@pytest.mark.parametrize("width", [1400, 400])
def test_every_image_loads_and_the_page_is_no_wider_than_the_window(page, tmp_path, width):
    found, console = checked(page, tmp_path, width)
    assert len(found["images"]) == page.read_text(encoding="utf-8").count("<img ") > 5
    assert all(complete and size > 100 for complete, size in found["images"])
    assert found["overflow"] <= 0, "a wide table scrolls in its own box, not the page"
    assert found["resources"] == []
    assert found["tables"] > 5
    assert console == []


def test_the_page_as_it_is_says_nothing_on_the_console(page, tmp_path):
    dom, console = browse(page, tmp_path / "profile")
    assert "What the numbers rest on" in dom
    assert console == []


def test_a_broken_page_would_be_noticed(page, tmp_path):
    broken = page.read_text(encoding="utf-8")
    broken = re.sub(r'src="data:image/png;base64,[^"]{100}', 'src="data:image/png;base64,AAAA', broken, count=1)
    broken = broken.replace("</main>", '<img alt="" src="http://127.0.0.1:9/x.png"></main>')
    path = tmp_path / "broken.html"
    path.write_text(broken, encoding="utf-8")
    found, console = checked(path, tmp_path, 1200)
    assert [size > 100 for _, size in found["images"]].count(False) == 2
    assert console
