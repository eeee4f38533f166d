-- Start an attempt, unless it, or a newer one, was started and not released.
-- KEYS[1]: the lease, "<attempt> <held until, ms> <started, ms; 0: not known> <owner>"; it outlives `held until` as the
-- mark of a started attempt. KEYS[2]: since when this server has kept leases and counts.
-- ARGV: attempt, owner, lease in ms, mark in seconds.
-- Returns what became of it, how many deliveries of the step came to nothing, and for how long, in ms, all were counted.
local counter = KEYS[1] .. ':suppressed'
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local since = string.match(redis.call('GET', KEYS[2]) or '', '^(%d+) ')
local counted = since and now - since or 0
local held = redis.call('GET', KEYS[1])
if held then
  local attempt, held_until = string.match(held, '^(%d+) (%d+) ')
  if tonumber(attempt) >= tonumber(ARGV[1]) then
    local suppressed = redis.call('INCR', counter)
    redis.call('EXPIRE', counter, ARGV[4])
    return {tonumber(held_until) > now and 'held_by_other' or 'already_started', suppressed, counted}
  end
end
redis.call('SET', KEYS[1], string.format('%s %.0f %.0f %s', ARGV[1], now + ARGV[3], now, ARGV[2]), 'EX', ARGV[4])
return {'held', tonumber(redis.call('GET', counter) or 0), counted}
