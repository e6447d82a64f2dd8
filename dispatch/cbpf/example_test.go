// SPDX-License-Identifier: Apache-2.0

package cbpf_test

import (
	"fmt"

	"github.com/cilium/ebpf/asm"

	"instar/dispatch/cbpf"
)

// A program that chooses among the sockets of a group by the last octet of a
// datagram's first word becomes part of an eBPF program that does so.
func Example() {
	// What nfbpf_compile makes of: ldb [3]; and #7; ret a
	program, err := cbpf.Parse("3,48 0 0 3,84 0 0 7,22 0 0 0")
	if err != nil {
		fmt.Println(err)
		return
	}
	dissect, err := cbpf.Translate(program, cbpf.Options{Context: cbpf.ReusePort})
	if err != nil {
		fmt.Println(err)
		return
	}

	// The main program calls it. This one goes on to take the value for the
	// index of a socket in a map, with bpf_sk_select_reuseport.
	main := asm.Instructions{
		asm.Mov.Reg(asm.R6, asm.R1),
		asm.Call.Label(cbpf.DefaultSymbol),
		// ...
	}
	fmt.Println(len(append(main, dissect...)) > len(program))
	// Output: true
}

func ExampleCheck() {
	program, err := cbpf.Parse("2\n52 0 0 0\n6 0 0 0\n")
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(cbpf.Check(program))
	// Output: classic BPF instruction 0 (div #0): division by the constant 0
}

func ExampleParse() {
	// The output of tcpdump -ddd "greater 100", cut short by a careless hand.
	_, err := cbpf.Parse("4\n128 0 0 0\n53 0 1 100\n6 0 0 262144\n")
	fmt.Println(err)
	// Output: parse classic BPF: line 1: there are 3 instructions, not 4: the text was cut, give all of it
}

func ExampleTranslate() {
	// tcpdump -ddd -y RAW "udp dst port 443", for IPv4.
	program, err := cbpf.Parse(`10
48 0 0 0
84 0 0 240
21 0 6 64
48 0 0 9
21 0 4 17
177 0 0 0
72 0 0 2
21 0 1 443
6 0 0 262144
6 0 0 0
`)
	if err != nil {
		fmt.Println(err)
		return
	}
	code, err := cbpf.Translate(program, cbpf.Options{Symbol: "https"})
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(code[0].Symbol(), len(program), "become", len(code))
	// Output: https 10 become 16
}
