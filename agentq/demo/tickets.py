"""The tickets that the demo's agent works on."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """What a customer wrote. `order_id` is the order that is to be refunded, None when nobody asks for that."""

    number: int
    customer: str
    text: str
    order_id: str | None = None

    @property
    def key(self) -> str:
        return f"ticket-{self.number}"


TICKETS = (
    Ticket(
        number=1, customer="Mia", order_id="1001", text="The kettle of order 1001 arrived broken. Please refund it."
    ),
    Ticket(number=2, customer="Noah", text="Which bulb fits the reading lamp of order 1002?"),
    Ticket(
        number=3, customer="Lena", order_id="1003", text="My espresso machine, order 1003, is cracked. I want a refund."
    ),
    Ticket(number=4, customer="Omar", order_id="1004", text="Order 1004 never arrived. Please refund it."),
    Ticket(number=5, customer="Ida", text="Years ago I placed the orders 907, 908 and 909. What was in them?"),
    Ticket(number=6, customer="Paul", order_id="1006", text="The chair of order 1006 came torn. Please refund it."),
)
