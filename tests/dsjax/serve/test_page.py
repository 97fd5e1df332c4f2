"""The page at `/` in a headless Chromium, against a server whose state the test sets."""

import contextlib
import re
import shutil
import time
from collections import defaultdict

import httpx
import pytest
from watched_server import WatchedServer, experts, load, request, step, token

from dsjax.engine.schedule.request import FinishReason
from dsjax.engine.tiers.disk_tier import DiskCounts
from dsjax.engine.tiers.page_tiers import TierCounts
from dsjax.serve.metrics import Metrics
from dsjax.serve.options import ServeOptions
from dsjax.serve.page.reference import render_reference
from dsjax.serve.page.routes import PAGE_PATHS

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

VIEWPORT = {"width": 1280, "height": 900}
EVIL = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script> & "quoted"'


@pytest.fixture(scope="module")
def browser():
    program = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_api.sync_playwright() as playwright:
        try:
            launched = playwright.chromium.launch(args=["--no-sandbox"], executable_path=program)
        except sync_api.Error as error:
            pytest.skip(f"no Chromium to test with: {error.message.splitlines()[0]}")
        sync_api.expect.set_options(timeout=60_000)
        yield launched
        launched.close()


@pytest.fixture
def server():
    with contextlib.closing(WatchedServer()) as watched:
        yield watched


@contextlib.contextmanager
def opened(browser, server, **options):
    """The page; at its end the console must hold no error but of answers that the test made fail."""
    context = browser.new_context(**{"viewport": VIEWPORT, **options})
    page = context.new_page()
    troubles: list[str] = []
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.on("console", lambda message: troubles.append(message.text) if message.type == "error" else None)
    foreign: list[str] = []
    page.on("request", lambda asked: None if asked.url.startswith(server.url) else foreign.append(asked.url))
    page.goto(server.url + "/")
    page.set_default_timeout(60_000)
    yield page
    assert [each for each in troubles if "Failed to load resource" not in each] == []
    assert foreign == [], "nothing comes from elsewhere"
    context.close()


def tile(page, name: str):
    return page.locator(f"#tiles div:has(dt:text-is('{name}')) dd")


def send(page, text: str, **knobs: str) -> None:
    page.evaluate("document.querySelector('.knobs').open = true")
    for name, value in {**knobs, "prompt": text}.items():
        page.fill(f"#{name}", value)
    page.press("#prompt", "Control+Enter")


def give_key(page, key: str) -> None:
    page.fill("#key", key)
    page.press("#key", "Tab")


def test_every_file_comes_with_a_policy_that_forbids_what_is_not_its_own(server):
    for path in PAGE_PATHS:
        answer = httpx.get(server.url + path)
        assert answer.status_code == 200, path
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'self';")
        assert "unsafe" not in policy
        assert "://" not in answer.text.replace("http://www.w3.org/2000/svg", ""), "no address of elsewhere"
        assert "innerHTML" not in answer.text
        assert httpx.head(server.url + path).status_code == 200


def test_a_chat_is_streamed_with_its_reasoning_folded_and_its_history_sent_again(browser, server):
    server.answers = [("let me ", ""), ("think", ""), ("", "hel"), ("", "lo `x`")]
    with opened(browser, server) as page:
        sync_api.expect(page.locator("#server")).to_have_text("tiny on dp=4: 4 × cpu")
        send(page, "who?", temperature="0", max_tokens="7")
        footer = page.locator(".turn.assistant footer")
        sync_api.expect(footer).to_contain_text("4 tokens · first after ")
        sync_api.expect(footer).to_contain_text("stop")
        assert page.inner_text(".turn.assistant .text") == "hello x"
        details = page.locator(".turn.assistant details")
        assert details.get_attribute("open") is None, "folded"
        assert page.text_content(".reasoning") == "let me think"
        knobs = {"temperature": 0, "top_p": 1, "top_k": 0, "max_tokens": 7}
        always = {"model": "tiny", "stream": True, "stream_options": {"include_usage": True}}
        assert server.asked[0] == {**always, **knobs, "messages": [{"role": "user", "content": "who?"}]}
        send(page, "and?")
        sync_api.expect(page.locator(".turn")).to_have_count(4)
        sync_api.expect(footer.nth(1)).to_contain_text("stop")
        assert [m["content"] for m in server.asked[1]["messages"]] == ["who?", "hello `x`", "and?"], "as it was said"
        page.click("#clear")
        assert page.locator(".turn").count() == 0


def test_what_a_model_and_a_user_write_is_text_and_never_markup(browser, server):
    server.answers = [(EVIL, ""), ("", EVIL)]
    with opened(browser, server) as page:
        send(page, EVIL)
        sync_api.expect(page.locator(".turn.assistant footer")).to_contain_text("stop")
        for written in (".turn.assistant .text", ".turn.user .text", ".reasoning"):
            assert page.text_content(written) == EVIL
        assert page.locator("main img").count() == 0
        assert page.evaluate("window.hacked") is None


def test_an_error_in_the_stream_is_shown_and_stop_ends_an_answer(browser, server):
    with opened(browser, server) as page:
        page.check("input[value=completion]")
        send(page, "def main(")
        sync_api.expect(page.locator(".turn.failed footer")).to_have_text("the engine has failed")
        assert server.asked[0]["prompt"] == "def main("
        page.check("input[value=chat]")
        server.answers, server.pause = [("", "more ")] * 100, 0.1
        send(page, "on and on")
        sync_api.expect(page.locator(".turn .text").nth(3)).to_contain_text("more more")
        assert page.is_disabled("#send")
        page.click("#stop")
        sync_api.expect(page.locator(".turn footer").nth(3)).to_have_text("stopped")
        assert page.is_enabled("#send")


def test_the_tiers_below_the_cache_are_shown_where_there_are_any(browser, server):
    with opened(browser, server) as page:
        sync_api.expect(tile(page, "cache held")).to_have_text("0 %")
        assert tile(page, "disk").count() == 0
    tiers, hits = {"host": TierCounts(10, 40, 0, 0, 0)}, {"device": 10, "host": 20, "disk": 5}
    server.ranks = [load(n)._replace(tiers=tiers, hits=hits, queried=100) for n in range(4)]
    server.disk = DiskCounts(30, 60)._asdict()
    with opened(browser, server) as page:
        for name, text in {"host memory": "25 %", "disk": "50 %", "hits below": "25 %"}.items():
            sync_api.expect(tile(page, name)).to_have_text(text)


def test_the_charts_show_what_the_registry_holds(browser, server):
    server.ranks = [load(0, running=3, waiting=1, used=40, cached=20), load(1), load(2), load(3, running=1, used=20)]
    with opened(browser, server) as page:
        for name, text in {"running": "4", "waiting": "1", "cache held": "15 %"}.items():
            sync_api.expect(tile(page, name)).to_have_text(text)
        assert page.locator("#requests rect").count() == 8
        assert page.locator("#pages title").first.text_content() == "rank 0: 40 held, 20 cached of 100"
        heights = page.eval_on_selector_all("#requests rect", "all => all.map(each => +each.getAttribute('height'))")
        assert heights[0] == pytest.approx(3 * heights[1], rel=1e-6), "three running stand on one waiting"
        assert page.is_visible("#unrecorded")
        server.metrics.on_step(step(server.ranks, experts=experts([[1, 1, 1, 1, 2, 2, 0, 8]])))
        made = request("chart", arrival=time.monotonic())
        for reason in (*[None] * 41, FinishReason.LENGTH):
            server.metrics.on_updates([token(made, reason)])
        sync_api.expect(page.locator("#experts rect")).to_have_count(8)
        assert page.text_content("#balance") == "hottest 4.00 × mean, balancedness of ranks 0.50"
        assert not page.is_visible("#unrecorded")
        sync_api.expect(page.locator("#tokens svg")).to_have_attribute("aria-label", re.compile(r"highest [12]\d"))
        assert page.locator("#tiles dt").count() % 4 == 0, "no tile stands alone, in four columns or in two"
        assert page.locator("#requests .scale div").all_text_contents() == ["4", "2", "0"]
        assert page.locator("#requests .axis div").all_text_contents() == ["rank 0", "1", "2", "3"]
        assert page.locator("#requests .numbers div").all_text_contents() == ["4", "0", "0", "1"]
        assert page.locator("#pages .scale div").all_text_contents() == ["100", "50", "0"]
        assert page.text_content("#usable") == "of 100 on each"
        sync_api.expect(tile(page, "between tokens, P50")).to_contain_text("ms")


def test_a_page_that_is_opened_late_has_the_last_minutes(browser, server):
    """40 tokens a second from 200 s ago to 100 s ago, on a clock of the test's, and then none; the page was not open."""
    begun = time.monotonic()
    now = [begun - 200.0]
    server.metrics = Metrics("tiny", 4, 4096, clock=lambda: now[0])
    made = request("before", arrival=now[0])
    while now[0] < begun - 100:
        server.metrics.on_step(step([load(0, running=7)]))
        for _ in range(40):
            server.metrics.on_updates([token(made)])
        now[0] += 1.0
    server.metrics.on_step(step([load(rank) for rank in range(4)]))
    now[0] = begun
    with opened(browser, server) as page:
        sync_api.expect(page.locator("#tokens svg")).to_have_attribute("aria-label", re.compile("highest 40$"))
        sync_api.expect(page.locator("#load svg")).to_have_attribute("aria-label", re.compile("highest 7$"))
        assert page.locator("#tokens .axis div").all_text_contents() == ["−5 min", "−4", "−3", "−2", "−1", "now"]
        drawn = page.get_attribute("#tokens polyline.one", "points")
        points = [tuple(map(float, each.split(","))) for each in drawn.split()]
        busy = [x for x, y in points if y == pytest.approx(0)]  # the top of a scale that goes to 40
        # 600 across are 300 s. The first point has no rate yet.
        assert min(busy) == pytest.approx(600 - 2 * 198, abs=3)
        assert max(busy) == pytest.approx(600 - 2 * 100, abs=5)
        assert points[-1][1] == 100, "nothing now"


def test_reasoning_can_be_read_while_it_comes_and_code_is_code_before_its_fence_closes(browser, server):
    server.answers = [("thinking aloud", "")] + [("", "so `f`:\n```python\ndef f():\n")] * 2 + [("", "    pass\n")] * 50
    server.pause = 0.4
    with opened(browser, server) as page:
        send(page, "hi")
        sync_api.expect(page.locator(".reasoning")).to_be_visible()
        assert page.text_content(".reasoning") == "thinking aloud"
        block = page.locator(".turn.assistant pre.code").first
        sync_api.expect(block).to_contain_text("def f():")
        assert page.text_content(".turn.assistant code") == "f"
        assert page.is_enabled("#stop"), "it still comes"
        page.click("#stop")


def test_the_pages_parser_agrees_with_prometheus_clients(browser, server):
    from prometheus_client.parser import text_string_to_metric_families

    server.metrics.on_updates([token(request("parsed"))])
    text = server.metrics.render().decode() + 'odd_total{of="x\\"y\\\\z\\n{,}w"} +Inf\nbare 1.5e-07 1700000000\n'
    read = """async (text) => {
        const { parse } = await import("/page/exposition.js");
        return [...parse(text)].map(([name, all]) => [name, all.map(({ labels, value }) => [labels, String(value)])]);
    }"""
    with opened(browser, server) as page:
        parsed = {name: [(labels, float(value)) for labels, value in all_] for name, all_ in page.evaluate(read, text)}
        quantile = page.evaluate("""async () => {
            const { parse, quantile } = await import("/page/exposition.js");
            const of = (a, b) => parse(`h_bucket{le="0.1"} 0\\nh_bucket{le="0.2"} ${a}\\nh_bucket{le="+Inf"} ${b}\\n`);
            return [0.25, 0.5, 0.9].map((share) => quantile(of(2, 2), of(12, 22), "h", share));
        }""")
    expected = defaultdict(list)
    for sample in (one for family in text_string_to_metric_families(text) for one in family.samples):
        expected[sample.name].append((sample.labels, sample.value))
    assert parsed == expected
    assert quantile == [pytest.approx(0.15), pytest.approx(0.2), 0.2]


def test_a_key_typed_into_the_page_opens_it_and_a_refusal_is_said(browser, server):
    server.api_key = "secret"
    with opened(browser, server) as page:
        notice = page.locator("#notice")
        sync_api.expect(notice).to_contain_text("wants an API key")
        give_key(page, "secret")
        sync_api.expect(notice).to_be_hidden()
        sync_api.expect(page.locator("#server")).to_contain_text("tiny on dp=4")
        sync_api.expect(page.locator("#tiles dd").first).to_be_visible()
        assert not page.is_visible("#record"), "this key is not the admin's"
        give_key(page, "admin")
        page.click("#record")
        sync_api.expect(notice).to_contain_text("admin endpoints are closed")


def test_on_a_real_server_with_keys_the_browsers_password_reads_and_the_typed_key_asks(browser, start_server):
    options = ServeOptions(api_keys=("secret",))
    server = start_server(num_ranks=4, metrics=Metrics("tiny", 4, 128), options=options)
    with opened(browser, server, http_credentials={"username": "anyone", "password": "secret"}) as page:
        sync_api.expect(page.locator("#tiles dd").first).to_have_text("0")
        page.check("input[value=completion]")
        send(page, "ab")
        sync_api.expect(page.locator(".turn.failed footer")).to_contain_text("missing or invalid API key")
        page.fill("#key", "secret")
        send(page, "ab", max_tokens="6")
        sync_api.expect(page.locator(".turn footer").nth(3)).to_contain_text("tokens · first after")
        sync_api.expect(page.locator("#pages rect")).to_have_count(8)


def test_a_server_that_is_not_ready_is_said_and_then_forgotten(browser, server):
    server.status = 503
    with opened(browser, server) as page:
        sync_api.expect(page.locator("#notice")).to_contain_text("not ready")
        server.status = 200
        sync_api.expect(page.locator("#notice")).to_be_hidden()


def test_everything_can_be_reached_by_keyboard(browser, server):
    with opened(browser, server) as page:
        assert not page.is_visible("#record"), "recording is offered to the admin's key"
        give_key(page, "admin")
        sync_api.expect(page.locator("#record")).to_be_visible()
        page.evaluate("document.activeElement.blur()")
        seen = []
        for _ in range(18):
            page.keyboard.press("Tab")
            seen.append(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
        for wanted in ("key", "prompt", "send", "SUMMARY", "record"):
            assert wanted in seen, seen
        unnamed = page.evaluate("""[...document.querySelectorAll("input, textarea")]
            .filter((each) => each.labels.length === 0).map((each) => each.id)""")
        assert unnamed == [], "every field has a label"


@pytest.mark.parametrize(("scheme", "width"), [("light", 320), ("dark", 320), ("dark", 768), ("light", 1280)])
def test_it_fits_narrow_screens_and_is_readable_in_light_and_dark(browser, server, scheme, width):
    with opened(browser, server, viewport={"width": width, "height": 800}, color_scheme=scheme) as page:
        send(page, "x" * 300)
        sync_api.expect(page.locator(".turn.assistant footer")).to_contain_text("stop")
        assert page.evaluate("document.documentElement.scrollWidth") <= width, "no sideways scrolling"
        # WCAG AA wants 4.5 between text and ground.
        contrasts = page.evaluate(CONTRASTS)
        assert len(contrasts) > 10
        assert min(ratio for _, ratio in contrasts) >= 4.5, contrasts


def test_docs_name_every_endpoint_and_field_without_a_network(browser, start_server):
    server = start_server(num_ranks=1)
    schema = server.get("/openapi.json").json()
    assert "HTTPValidationError" not in str(schema), "every error has OpenAI's shape"
    with opened(browser, server, viewport={"width": 320, "height": 800}) as page:
        page.goto(server.url + "/docs#ChatRequest")
        assert page.evaluate("document.documentElement.scrollWidth") <= 320
        shown = set(page.locator("h3 code").all_text_contents())
        assert shown == {f"{method.upper()} {path}" for path, all_ in schema["paths"].items() for method in all_}
        for name, shape in schema["components"]["schemas"].items():
            rows = page.locator(f"[id='{name}'] th").all_text_contents()
            assert rows == list(shape.get("properties", {})), name
        (stop,) = page.locator("#CompletionRequest tr").filter(has=page.get_by_text("stop", exact=True)).all()
        assert "string (at most 1024 characters) or list of string" in stop.text_content()
        broken = page.evaluate("""[...document.querySelectorAll("a[href^='#']")].map((each) => each.hash.slice(1))
            .filter((id) => !document.getElementById(id))""")
        assert broken == []
        assert min(ratio for _, ratio in page.evaluate(CONTRASTS)) >= 4.5


def test_what_a_schema_says_is_text_in_docs_and_never_markup():
    field = {"type": "string", "description": EVIL, "enum": [EVIL], "default": EVIL}
    body = {"properties": {EVIL: field}, "required": [], "description": EVIL}
    operation = {"summary": EVIL, "responses": {"200": {"description": EVIL}}}
    schema = {"info": {"version": EVIL}, "paths": {EVIL: {"get": operation}}, "components": {"schemas": {EVIL: body}}}
    text = render_reference(schema)
    assert text.count("&lt;script&gt;") > 6
    assert not re.search("<script|<img", text)


CONTRASTS = """() => {
    const channels = (color) => color.match(/[\\d.]+/g).map(Number);
    const linear = (s) => s <= 0.04045 ? s / 12.92 : ((s + 0.055) / 1.055) ** 2.4;
    const light = (color) => {
        const [r, g, b] = channels(color).slice(0, 3).map((c) => linear(c / 255));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const ground = (node) => {
        const color = node && getComputedStyle(node).backgroundColor;
        return !node ? "rgb(255, 255, 255)" : channels(color)[3] !== 0 ? color : ground(node.parentElement);
    };
    const hasText = (node) => [...node.childNodes].some((c) => c.nodeType === 3 && c.textContent.trim());
    const shown = (node) => node.checkVisibility() && !node.disabled && hasText(node);
    return [...document.querySelectorAll("body *")].filter(shown).map((node) => {
        const [a, b] = [light(getComputedStyle(node).color), light(ground(node))].sort((x, y) => y - x);
        return [node.tagName + "." + node.className, (a + 0.05) / (b + 0.05)];
    });
}"""
