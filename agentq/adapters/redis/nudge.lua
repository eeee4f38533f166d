-- Wake the keeper, unless something wakes it already.
-- KEYS[1]: the list it waits for.
if redis.call('EXISTS', KEYS[1]) == 0 then
  redis.call('LPUSH', KEYS[1], '')
end
return 0
