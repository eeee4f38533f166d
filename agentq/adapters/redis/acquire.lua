-- Start an attempt, unless it, or a newer one, was started and not released.
-- KEYS[1]: the lease, "<attempt> <held until, ms> <owner>"; it outlives `held until` as the mark of a started attempt.
-- ARGV: attempt, owner, lease in ms, mark in seconds.
local held = redis.call('GET', KEYS[1])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
if held then
  local attempt, held_until = string.match(held, '^(%d+) (%d+) ')
  if tonumber(attempt) >= tonumber(ARGV[1]) then
    -- How often a delivery was turned away, for those who ask why nothing moves.
    local refused = KEYS[1] .. ':refused'
    redis.call('INCR', refused)
    redis.call('EXPIRE', refused, ARGV[4])
    if tonumber(held_until) > now then
      return 'held_by_other'
    end
    return 'already_started'
  end
end
redis.call('SET', KEYS[1], string.format('%s %.0f %s', ARGV[1], now + ARGV[3], ARGV[2]), 'EX', ARGV[4])
return 'held'
