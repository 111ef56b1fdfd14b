"""Pictures of a run with large numbers."""

import re
from types import SimpleNamespace

from tasks.report_page.chart import text_width
from tasks.report_page.pictures import draw_pictures
from tasks.report_page.quantity import seconds


def test_values_beside_bars_stay_in_the_picture() -> None:
    seconds = {f"{stage}_seconds": 1e7 for stage in ("read", "tokenize", "plan", "infer", "write")}
    run = SimpleNamespace(
        **seconds, total_seconds=9e7, num_prompt_tokens=1_200_000_000, num_cached_tokens=10_000_000, is_shared=True,
        token_saving_ratio=0.01, best_token_saving_ratio=0.02,
    )  # fmt: skip
    facts = SimpleNamespace(run=run, totals=None, bins=[], share_degrees=[], cached_shares=[], lengths=[])
    pictures = draw_pictures(facts)  # type: ignore[arg-type]
    for name, num_bars in (("stages", 6), ("savings", 4)):
        places = re.findall(r'<text x="([^"]+)" y="[^"]+" class="name">([^<]+)<', pictures[name].content)
        assert len(places) == num_bars
        for left, text in places:
            assert float(left) + text_width(text) <= pictures[name].width, text


def test_a_second_is_not_a_thousand_milliseconds() -> None:
    assert [seconds(value) for value in (0.9994, 0.9996, 99.94, 99.96)] == ["999 ms", "1.0 s", "99.9 s", "1 min 40 s"]
