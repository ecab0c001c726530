from mooncake_store._core import Grant, GrantTable


def ids(grants: list[Grant]) -> list[int]:
    return [grant.id for grant in grants]


def test_a_grant_expires_when_its_time_is_over_and_not_before():
    table = GrantTable(ttl_s=10.0)
    first = table.grant(1, b"", now_s=100.0)
    second = table.grant(1, b"", now_s=105.0)
    assert table.first_deadline_s == 110.0
    assert ids(table.take_expired(109.9)) == []
    assert ids(table.take_expired(110.0)) == [first.id]
    assert ids(table.take_expired(200.0)) == [second.id]
    assert table.first_deadline_s is None


def test_a_renewed_grant_outlives_younger_ones():
    table = GrantTable(ttl_s=10.0)
    first = table.grant(1, b"", now_s=100.0)
    second = table.grant(1, b"", now_s=101.0)
    assert table.renew(first.id, 1, now_s=109.0)
    assert ids(table.take_expired(112.0)) == [second.id]
    assert table.first_deadline_s == 119.0


def test_only_the_client_it_was_given_to_can_renew_or_end_a_grant():
    table = GrantTable(ttl_s=10.0)
    grant = table.grant(1, b"", now_s=0.0)
    assert not table.renew(grant.id, 2, now_s=5.0)
    assert table.take(grant.id, 2) is None
    assert ids([table.take(grant.id, 1)]) == [grant.id]
    assert table.take(grant.id, 1) is None
    assert not table.renew(grant.id, 1, now_s=5.0)


def test_a_lost_client_loses_its_grants_and_no_others():
    table = GrantTable(ttl_s=10.0)
    mine = [table.grant(1, b"", now_s=0.0), table.grant(1, b"", now_s=1.0)]
    other = table.grant(2, b"", now_s=0.5)
    assert ids(table.take_all(1)) == ids(mine)
    assert ids(table.take_expired(100.0)) == [other.id]
    assert len(table) == 0


def test_all_grants_that_have_not_ended_are_named():
    table = GrantTable(ttl_s=10.0)
    grants = [table.grant(client, bytes([client, 0, 0, 0]), now_s=0.0) for client in (1, 2, 3)]
    table.take(grants[1].id, 2)
    assert [(grant.id, grant.slots) for grant in table.all()] == [
        (grants[0].id, b"\1\0\0\0"),
        (grants[2].id, b"\3\0\0\0"),
    ]
