-- Read many leases, and since when this server has kept them: a flush, a restart or a failover begins anew.
-- KEYS[1]: the marker, "<since, ms> <run id of the server>"; the others: leases. Returns now, since, leases, and how many
-- deliveries of each came to nothing.
local time = redis.call('TIME')
local now = string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000))
local server = string.match(redis.call('INFO', 'server'), 'run_id:(%w+)')
local since, marked = string.match(redis.call('GET', KEYS[1]) or '', '^(%d+) (%w+)$')
if marked ~= server then
  since = now
  redis.call('SET', KEYS[1], now .. ' ' .. server)
end
if #KEYS == 1 then
  return {now, since, {}, {}}
end
local counters = {}
for place = 2, #KEYS do
  counters[place - 1] = KEYS[place] .. ':suppressed'
end
return {now, since, redis.call('MGET', unpack(KEYS, 2)), redis.call('MGET', unpack(counters))}
