-- Read many leases, and since when this server has kept them: a flush, a restart or a failover begins anew.
-- KEYS[1]: the marker, "<since, ms> <run id of the server>"; the others: leases. Returns now, since, leases.
local time = redis.call('TIME')
local now = string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000))
local server = string.match(redis.call('INFO', 'server'), 'run_id:(%w+)')
local since, marked = string.match(redis.call('GET', KEYS[1]) or '', '^(%d+) (%w+)$')
if marked ~= server then
  since = now
  redis.call('SET', KEYS[1], now .. ' ' .. server)
end
local found = #KEYS > 1 and redis.call('MGET', unpack(KEYS, 2)) or {}
return {now, since, found}
