-- A clean exit: lease and mark go, if they are the owner's.
-- KEYS[1]: the lease. ARGV: owner, 1 if the delivery came to nothing, mark in seconds.
local held = redis.call('GET', KEYS[1])
if held and string.match(held, '^%d+ %d+ %d+ (.*)$') == ARGV[1] then
  redis.call('DEL', KEYS[1])
end
if ARGV[2] == '1' then
  redis.call('INCR', KEYS[1] .. ':suppressed')
  redis.call('EXPIRE', KEYS[1] .. ':suppressed', ARGV[3])
end
return 0
