// Package chaos breaks things around real larder processes, and checks that nothing acknowledged is lost and no wrong
// byte is ever read. It has no code beside tests.
//
// Each case starts a cluster of three or five masters, whose data directories lie on small file systems of their own and
// whose links, to each other and to clients, go through proxies in this process. Clients store, read, delete and verify
// meanwhile, a part of them on shared keys, whose history must have an order that explains it. After the faults
// everything must work again, all replicas agree, and every byte of the index be found in the pool.
//
// The default run has the first three cases. -cases=12 runs twelve, -cases=all every one, -cases=disk-full,clog those;
// -minutes=60 draws faults at random for an hour, from -seed. -report=FILE writes what was counted and measured; the same
// is printed as a table.
package chaos
