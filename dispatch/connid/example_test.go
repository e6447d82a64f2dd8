// SPDX-License-Identifier: Apache-2.0

package connid_test

import (
	"bytes"
	"fmt"

	"instar/dispatch/connid"
)

// exampleKeys stands for 48 octets that are derived from the secret of a group.
func exampleKeys() connid.Keys {
	keys, err := connid.KeysFromBytes(bytes.Repeat([]byte("example secret. "), 3))
	if err != nil {
		panic(err)
	}
	return keys
}

func Example() {
	codec, err := connid.New(exampleKeys(), nil)
	if err != nil {
		fmt.Println(err)
		return
	}

	// Worker 17 of generation 7, which has slot 3, gives a client this ID.
	cid, err := codec.Append(nil, connid.MakeHandle(3, 17), 7)
	if err != nil {
		fmt.Println(err)
		return
	}

	// Whoever shares the keys and knows the owners of the slots can route it.
	owners := map[uint8]uint32{2: 6, 3: 7}
	handle, ok := codec.Open(cid, func(h connid.Handle) uint32 { return owners[h.Slot()] })
	fmt.Println(len(cid), handle, ok)

	// When a later generation has the slot, the ID is nobody's.
	owners[3] = 9
	_, ok = codec.Open(cid, func(h connid.Handle) uint32 { return owners[h.Slot()] })
	fmt.Println(ok)
	// Output:
	// 14 3/17 true
	// false
}

func ExampleCodec_Classify() {
	codec, err := connid.New(exampleKeys(), nil)
	if err != nil {
		fmt.Println(err)
		return
	}
	generation := func(connid.Handle) uint32 { return 7 }
	cid, err := codec.Append(nil, connid.MakeHandle(3, 17), 7)
	if err != nil {
		fmt.Println(err)
		return
	}

	// A client's first packet has an ID of its own choice, later ones have ours.
	initial := []byte{0xc0, 0, 0, 0, 1, 8, 1, 2, 3, 4, 5, 6, 7, 8, 0}
	later := append([]byte{0x40}, cid...)
	fmt.Println(codec.Classify(initial, generation).Kind)
	fmt.Println(codec.Classify(later, generation).Kind, codec.Classify(later, generation).Handle)
	// Output:
	// foreign long
	// ours 3/17
}

func ExampleLoadBalancer() {
	lb := &connid.LoadBalancer{
		ConfigRotation: 2,
		ServerID:       []byte{0xc0, 0xff, 0xee},
		NonceLen:       8,
		Key:            []byte("sixteen octets!!"),
	}
	codec, err := connid.New(exampleKeys(), lb)
	if err != nil {
		fmt.Println(err)
		return
	}
	cid, err := codec.Append(nil, connid.MakeHandle(3, 17), 7)
	if err != nil {
		fmt.Println(err)
		return
	}

	// The balancer in front finds the host, the host finds the socket.
	host, err := lb.DecodeServerID(cid)
	if err != nil {
		fmt.Println(err)
		return
	}
	handle, ok := codec.Open(cid, func(connid.Handle) uint32 { return 7 })
	fmt.Printf("%d octets, host %x, socket %v %v\n", len(cid), host, handle, ok)
	// Output:
	// 18 octets, host c0ffee, socket 3/17 true
}
