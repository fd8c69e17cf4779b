"""The manual's site: what its search finds first, and that it loads nothing from afar.

The index is the one that the site is built with, and the ranking that of its theme:
every word is a prefix, a title counts a thousand times as much as text, and a section
that has all the words counts more than one that has some.
"""

import html
import json
import re

import pytest
from helpers import ROOT


pytestmark = pytest.mark.more

#: By the page that has to come first.
QUESTIONS = {
    "": ["installation"],
    "checkpoints": ["checkpoint", "ema", "schedule-free"],
    "fine_tuning": ["fine-tuning", "finetune", "LoRA"],
    "from_optax": ["optax.contrib.muon"],
    "from_torch": ["pytorch"],
    "labels": ["freeze", "frozen", "stop_gradient", "lion", "decay mask"],
    "layouts": ["FSDP"],
    "libraries": ["huggingface", "maxtext", "keras", "equinox"],
    "limits": ["citation"],
    "logging": ["wandb", "tensorboard"],
    "parameters_names": ["interleaved", "per-head"],
    "qk_clip": ["MLA", "GQA", "rope", "gradient accumulation"],
    "quick_start_linen": ["TrainState"],
    "reinforcement": ["GRPO"],
    "speed": ["out of memory", "offload", "host memory", "bfloat16"],
    "speedruns": ["speedrun"],
    "accelerators": ["TPU"],
    "troubleshooting": ["loss spike", "NaN", "faq"],
    "tuning": ["hyperparameters"],
    "tuning_rates": ["learning rate", "warmup"],
    "vision": ["diffusion", "DiT", "mamba", "ViT"],
}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    build = pytest.importorskip("mkdocs.commands.build", reason="needs the extra dev")
    from mkdocs.config import load_config

    folder = tmp_path_factory.mktemp("site")
    build.build(load_config(str(ROOT / "docs" / "mkdocs.yml"), site_dir=str(folder)))
    return folder


@pytest.fixture(scope="module")
def search(site):
    lunr = pytest.importorskip("lunr", reason="needs the extra dev")
    from lunr.stemmer import stemmer

    sections = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    for section in sections:
        for field in ("title", "text"):
            text = re.sub(r"<[^>]*>", " ", section.get(field, ""))
            # As the separator in mkdocs.yml splits words; lunr's own splits at spaces.
            words = re.split(r"[\s\-,:!=\[\]()\"'`{}/]+|\.(?!\d)", html.unescape(text))
            section[field] = " ".join(words)
    fields = [{"field_name": "title", "boost": 1000}, {"field_name": "text"}]
    builder = lunr.get_default_builder()
    builder.pipeline.remove(stemmer)  # words of the theme's index keep their ends
    index = lunr.lunr("location", fields, sections, builder=builder)

    def pages(question):
        words = re.findall(r"\w+", question.lower())
        scores: dict[str, float] = {}
        for found in index.search(" ".join(f"{word}*" for word in words)):
            terms = list(found["match_data"].metadata)
            seen = sum(any(t.startswith(w[:4]) for t in terms) for w in words)
            is_page = "#" not in found["ref"]
            score = found["score"] * (1 + (is_page + seen / len(words)) ** 2)
            page = found["ref"].split("#")[0].rstrip("/")
            scores[page] = max(score, scores.get(page, 0.0))
        return sorted(scores, key=lambda page: -scores[page])

    return pages


@pytest.mark.parametrize(
    "question, page", [(x, page) for page, of in QUESTIONS.items() for x in of]
)
def test_the_right_page_comes_first(search, question, page):
    assert search(question)[:1] == [page], search(question)[:5]


def test_the_site_works_offline(site):
    """No script, style, picture or font of a page is on another host."""
    pages = list(site.rglob("*.html"))
    assert len(pages) > 60  # of pages and of old addresses
    for page in pages:
        text = page.read_text()
        loaded = re.findall(r"<(?:script|img|source)[^>]* src=.?(https?:[^ >]*)", text)
        for link in re.findall(r"<link[^>]*>", text):
            if "canonical" not in link and "alternate" not in link:
                loaded += re.findall(r"href=.?(https?:[^ >]*)", link)
        assert loaded == [], page


def test_old_addresses_send_the_reader_on(site):
    moved = {x: x.read_text() for x in site.rglob("*.html")}
    moved = {x: text for x, text in moved.items() if "This page has moved" in text}
    assert len(moved) > 30
    for page, text in moved.items():
        (to,) = set(re.findall(r'(?:href|url|replace\()[="]*([./\w]+/)"', text))
        assert (page.parent / to / "index.html").exists(), page


def test_a_phone_gets_a_picture_of_its_own(site):
    found = [
        (page, source)
        for page in site.rglob("index.html")
        for source in re.findall(
            r'<source media=[^>]* srcset="([^"]*)"', page.read_text()
        )
    ]
    assert site / "index.html" in [page for page, _ in found]
    assert all((page.parent / source).exists() for page, source in found)
