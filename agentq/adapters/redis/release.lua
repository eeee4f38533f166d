-- A clean exit: lease and mark go, if they are the owner's.
-- KEYS[1]: the lease. ARGV: owner.
local held = redis.call('GET', KEYS[1])
if held and string.match(held, '^%d+ %d+ (.*)$') == ARGV[1] then
  redis.call('DEL', KEYS[1])
end
return 0
