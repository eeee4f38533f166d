-- Mark these keys as one deployment's; returns whose they are.
-- KEYS[1]: the mark. ARGV: the deployment.
redis.call('SET', KEYS[1], ARGV[1], 'NX')
return redis.call('GET', KEYS[1])
