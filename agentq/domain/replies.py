"""What must hold of a model's reply before its calls become steps: each call has an id of its own."""

from dataclasses import replace

from agentq.domain.model import ModelReply


def with_own_ids(reply: ModelReply) -> ModelReply:
    """The reply with a new id for each call that has none, or one that an earlier call of the reply has.

    The same reply always gets the same ids.
    """
    taken = {call.id for call in reply.tool_calls}
    used: set[str] = set()
    calls = []
    for index, call in enumerate(reply.tool_calls, start=1):
        own = call.id
        if not own or own in used:
            base = call.id or f"call_{index}"
            own = base
            suffix = 1
            while own in taken or own in used:
                suffix += 1
                own = f"{base}_{suffix}"
        used.add(own)
        calls.append(call if own == call.id else replace(call, id=own))
    return replace(reply, tool_calls=tuple(calls))
