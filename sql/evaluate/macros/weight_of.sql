-- purpose: how often a bootstrap replicate draws a row: Poisson(1) by the inverse of its distribution function,
--          deterministic; replicate 0 has each row once
-- grain:   a scalar
-- inputs:  none
-- parameters: none

create or replace temp macro weight_of(draw, replicate) as case
    when replicate = 0 then 1
    else
        (hash(xor(draw, hash(replicate))) > 0.36787944117 * 18446744073709551616)::integer
        + (hash(xor(draw, hash(replicate))) > 0.73575888234 * 18446744073709551616)::integer
        + (hash(xor(draw, hash(replicate))) > 0.91969860293 * 18446744073709551616)::integer
        + (hash(xor(draw, hash(replicate))) > 0.98101184312 * 18446744073709551616)::integer
        + (hash(xor(draw, hash(replicate))) > 0.99634015317 * 18446744073709551616)::integer
        + (hash(xor(draw, hash(replicate))) > 0.99940581518 * 18446744073709551616)::integer
        + (hash(xor(draw, hash(replicate))) > 0.99991675884 * 18446744073709551616)::integer
end
