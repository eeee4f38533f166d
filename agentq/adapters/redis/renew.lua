-- Hold on for a while from now; a missing lease is taken again, unless another holds it or a newer attempt was started.
-- Never shortens: a beat that was sent before the lease was extended may arrive after that.
-- KEYS[1]: the lease. KEYS[2]: since when leases and counts are kept. ARGV: attempt, owner, lease in ms, mark in seconds.
-- Returns whether it is held, how many deliveries came to nothing, and for how long, in ms, all were counted.
local held = redis.call('GET', KEYS[1])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local hold_until, started = now + ARGV[3], '0'
if held then
  local attempt, held_until, its_start, owner = string.match(held, '^(%d+) (%d+) (%d+) (.*)$')
  if owner == ARGV[2] then
    hold_until, started = math.max(hold_until, tonumber(held_until)), its_start
  elseif tonumber(held_until) > now or tonumber(attempt) > tonumber(ARGV[1]) then
    return {0, 0, 0}
  end
end
redis.call('SET', KEYS[1], string.format('%s %.0f %s %s', ARGV[1], hold_until, started, ARGV[2]), 'EX', ARGV[4])
local since = string.match(redis.call('GET', KEYS[2]) or '', '^(%d+) ')
return {1, tonumber(redis.call('GET', KEYS[1] .. ':suppressed') or 0), since and now - since or 0}
