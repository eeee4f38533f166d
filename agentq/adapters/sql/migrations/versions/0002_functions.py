"""The two changes that every step makes, as one round trip and one transaction each: fence, and a settle that fits.

A name ends in its version: a changed function gets a new one, so that old and new workers run side by side. Each locks
the run's row first; its later statements see what was committed before the lock was theirs. No EXCEPTION block: that
would be a subtransaction, with an id of its own.
"""

from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

FENCE = """
CREATE FUNCTION agentq_fence_1(
    p_run_id text, p_number integer, p_attempt integer, p_id text, p_owner text, p_tool text, p_effect text,
    p_deadline_seconds double precision, p_settles_within_seconds double precision, p_is_callable boolean,
    p_has_probe boolean, p_event text
) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    r record;
    v_now timestamptz;
BEGIN
    SELECT agent, status, cancel_requested, pending_effect_id, events_count INTO r
    FROM runs WHERE id = p_run_id FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        RETURN 'moved_on';
    END IF;
    IF r.pending_effect_id = p_id THEN
        RETURN 'stamped';
    END IF;
    IF r.status NOT IN ('queued', 'running', 'waiting_for_approval') OR r.cancel_requested THEN
        RETURN 'moved_on';
    END IF;
    IF NOT EXISTS (
        SELECT FROM steps
        WHERE run_id = p_run_id AND number = p_number AND attempt = p_attempt AND state = 'available'
    ) THEN
        RETURN 'moved_on';
    END IF;
    IF r.pending_effect_id IS NOT NULL THEN
        RETURN 'fence_stands';
    END IF;
    -- Whoever pauses waits for the fences that are being stamped, and they for them: once a pause is committed, none
    -- comes that didn't see it.
    PERFORM pg_advisory_xact_lock_shared(hashtext('agentq pauses'));
    IF EXISTS (SELECT FROM pauses WHERE tool IN ('', p_tool) AND agent IN ('', r.agent)) THEN
        RETURN 'paused';
    END IF;
    v_now := clock_timestamp();
    INSERT INTO events (run_id, sequence, at, kind, number, attempt, actor, data)
    VALUES (p_run_id, r.events_count + 1, v_now, 'fence.stamped', p_number, p_attempt, p_owner, p_event);
    UPDATE runs SET
        events_count = events_count + 1,
        pending_effect_id = p_id,
        pending_effect_number = p_number,
        pending_effect_attempt = p_attempt,
        pending_effect_tool = p_tool,
        pending_effect_effect = p_effect,
        pending_effect_owner = p_owner,
        pending_effect_stamped_at = v_now,
        pending_effect_deadline_at = v_now + make_interval(secs => p_deadline_seconds),
        pending_effect_settles_within_seconds = p_settles_within_seconds,
        pending_effect_is_callable = p_is_callable,
        pending_effect_has_probe = p_has_probe,
        pending_effect_probes = 0
    WHERE id = p_run_id;
    RETURN 'stamped';
END
$$
"""

# Returns no status (null) and has changed nothing when the settle doesn't fit.
SETTLE = """
CREATE FUNCTION agentq_settle_1(
    p_run_id text, p_number integer, p_attempt integer, p_owner text, p_fence_id text, p_result text,
    p_is_error boolean, p_input_tokens integer, p_output_tokens integer, p_then text, p_output text, p_calls jsonb,
    p_event text, p_suppressed integer,
    OUT o_status text, OUT o_agent text, OUT o_first_number integer, OUT o_opened jsonb
) LANGUAGE plpgsql AS $$
DECLARE
    r record;
    v_now timestamptz;
    v_added integer := 0;
    v_open_calls integer := 0;
    v_events integer := 1;
    v_lost integer := 0;
    v_batch integer;
    v_status text := 'running';
BEGIN
    SELECT status, agent, next_step, open_calls, events_count, events_lost, cancel_requested, pending_effect_id INTO r
    FROM runs WHERE id = p_run_id FOR NO KEY UPDATE;
    IF NOT FOUND OR r.status NOT IN ('queued', 'running') OR r.cancel_requested
       OR r.pending_effect_id IS DISTINCT FROM p_fence_id THEN
        RETURN;
    END IF;
    v_now := clock_timestamp();
    UPDATE steps SET
        state = 'completed',
        result = p_result,
        is_error = p_is_error,
        input_tokens = p_input_tokens,
        output_tokens = p_output_tokens,
        may_have_happened = false,
        settled_by = p_owner,
        finished_at = v_now,
        suppressed = coalesce(p_suppressed, suppressed)
    WHERE run_id = p_run_id AND number = p_number AND attempt = p_attempt AND state = 'available';
    IF NOT FOUND THEN
        RETURN;
    END IF;

    IF p_then = 'answer' THEN
        v_status := 'completed';
        v_events := 2;
    ELSIF p_then = 'turn' THEN
        INSERT INTO steps (
            run_id, number, kind, state, batch, tool, call_id, arguments, effect, deadline_seconds,
            due_at, dispatched_at
        )
        SELECT
            p_run_id, r.next_step + call.position::integer - 1, 'tool',
            CASE WHEN call.is_open THEN 'available' ELSE 'waiting' END,
            call.batch, call.tool, call.call_id, call.arguments, call.effect, call.deadline_seconds,
            CASE WHEN call.is_open THEN v_now END, CASE WHEN call.is_open THEN v_now END
        FROM ROWS FROM (
            jsonb_to_recordset(p_calls) AS (
                batch integer, tool text, call_id text, arguments text, effect text, deadline_seconds double precision,
                is_open boolean
            )
        ) WITH ORDINALITY AS call (
            batch, tool, call_id, arguments, effect, deadline_seconds, is_open, position
        );
        v_added := jsonb_array_length(p_calls);
        SELECT count(*) INTO v_open_calls FROM jsonb_array_elements(p_calls) AS call WHERE (call->>'is_open')::boolean;
    ELSIF r.open_calls > 1 THEN
        v_open_calls := r.open_calls - 1;
    ELSE
        -- Later batches have higher numbers.
        SELECT min(batch) INTO v_batch FROM steps
        WHERE run_id = p_run_id AND number > p_number AND state = 'waiting';
        IF v_batch IS NOT NULL THEN
            WITH opened AS (
                UPDATE steps SET state = 'available', due_at = v_now, dispatched_at = v_now
                WHERE run_id = p_run_id AND number > p_number AND state = 'waiting' AND batch = v_batch
                RETURNING number, attempt, tool, effect, deadline_seconds, is_isolated
            )
            SELECT count(*), jsonb_agg(to_jsonb(opened) ORDER BY number) INTO v_open_calls, o_opened FROM opened;
        ELSE
            INSERT INTO steps (run_id, number, kind, state, effect, due_at, dispatched_at)
            VALUES (p_run_id, r.next_step, 'model', 'available', 'read_only', v_now, v_now);
            v_added := 1;
        END IF;
    END IF;

    IF p_event IS NOT NULL THEN
        INSERT INTO events (run_id, sequence, at, kind, number, attempt, actor, data)
        VALUES (p_run_id, r.events_count + 1, v_now, 'step.settled', p_number, p_attempt, p_owner, p_event);
        IF v_status = 'completed' THEN
            INSERT INTO events (run_id, sequence, at, kind, actor, data)
            VALUES (p_run_id, r.events_count + 2, v_now, 'run.completed', p_owner, '{}');
            PERFORM agentq_seal_1(p_run_id, r.events_count + 2, r.events_lost, v_now);  -- Of a later revision.
        END IF;
    END IF;
    IF p_event IS NULL THEN
        v_lost := v_events;
        v_events := 0;
    END IF;

    -- What keeps its value doesn't count as changed: without a new status the row stays within its page.
    UPDATE runs SET
        status = v_status,
        started_at = coalesce(started_at, v_now),
        finished_at = CASE WHEN v_status = 'completed' THEN v_now END,
        output = CASE WHEN v_status = 'completed' THEN p_output END,
        next_step = next_step + v_added,
        open_calls = v_open_calls,
        events_count = events_count + v_events,
        events_lost = events_lost + v_lost,
        pending_effect_id = NULL,
        pending_effect_number = NULL,
        pending_effect_attempt = NULL,
        pending_effect_tool = NULL,
        pending_effect_effect = NULL,
        pending_effect_owner = NULL,
        pending_effect_stamped_at = NULL,
        pending_effect_deadline_at = NULL,
        pending_effect_settles_within_seconds = NULL,
        pending_effect_is_callable = NULL,
        pending_effect_has_probe = NULL,
        pending_effect_probes = NULL,
        pending_effect_failure_class = NULL,
        pending_effect_error = NULL
    WHERE id = p_run_id;
    o_status := v_status;
    o_agent := r.agent;
    IF v_added > 0 THEN
        o_first_number := r.next_step;
    END IF;
END
$$
"""


def upgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":
        op.get_bind().exec_driver_sql(FENCE)
        op.get_bind().exec_driver_sql(SETTLE)
