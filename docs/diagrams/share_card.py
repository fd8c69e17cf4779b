"""What each device of a mesh iterates, in order, as long as it costs."""

from card import Card, COLORS, FAINT, GRAY, PALE
from jax.sharding import PartitionSpec as P
from mesh_plan import Leaf, Plan


SHAPES = {"up": (6, 1024, 2048), "query": (10, 1024, 1024), "key": (20, 512, 1024)}
WIDTH, LEFT, WIDE = 936, 112, 640
TOP, ROW, EXCHANGE = 64, 40, 64


def share_card() -> Card:
    leaves = [Leaf(name, shape, P(None, "fsdp")) for name, shape in SHAPES.items()]
    plan = Plan({"fsdp": 4}, leaves)
    title = "Whole matrices, shared out by cost"
    card = Card(WIDTH, TOP + 4 * ROW + 58, title)
    longest = max(sum(cost for _, cost in plan.costs(i)) for i in range(4))
    for device in range(4):
        y = TOP + device * ROW
        card.text(24, y + 14, f"device {device}", anchor="start", bold=True)
        _draw_share(card, plan, device, y, WIDE / longest)
    _draw_exchanges(card, len(plan.exchanges))
    _draw_legend(card, plan)
    return card


def _draw_share(card: Card, plan: Plan, device: int, y: float, unit: float) -> None:
    x = LEFT + EXCHANGE
    for stack, cost in plan.costs(device):
        card.mark(x, y, cost * unit, 28, COLORS[stack])
        x += cost * unit


def _draw_exchanges(card: Card, count: int) -> None:
    for x in (LEFT, LEFT + EXCHANGE + WIDE + 8):
        card.box(x, TOP - 4, EXCHANGE - 8, 4 * ROW - 4, fill=PALE)
        middle = x + EXCHANGE / 2 - 4
        card.text(middle, TOP + 2 * ROW - 14, f"{count} all-", color=GRAY)
        card.text(middle, TOP + 2 * ROW + 2, "to-all", color=GRAY)


def _draw_legend(card: Card, plan: Plan) -> None:
    x, y = LEFT + EXCHANGE, TOP + 4 * ROW + 14
    for i, (_, stack, *_) in enumerate(plan.stacks):
        m, n = stack.shape
        card.mark(x, y, 12, 12, COLORS[i])
        words = f"{stack.count} of {m} x {n}"
        card.text(x + 18, y + 6, words, anchor="start")
        x += 160
    card.line(x + 4, y - 6, x + 4, y + 20, color=FAINT)
    words = "length: multiplications"
    card.text(x + 18, y + 6, words, anchor="start", color=GRAY)
