-- Let an attempt that was started and lost start again, unless it is held, or another one was started.
-- KEYS[1]: the lease. ARGV: attempt.
local held = redis.call('GET', KEYS[1])
if not held then
  return 1
end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local attempt, held_until = string.match(held, '^(%d+) (%d+) ')
if tonumber(held_until) > now or attempt ~= ARGV[1] then
  return 0
end
redis.call('DEL', KEYS[1])
return 1
