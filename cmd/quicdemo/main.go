// SPDX-License-Identifier: Apache-2.0

// Command quicdemo is an HTTP/3 server that upgrades itself with nothing lost,
// and a load client that proves it. Run it with --help.
package main

import (
	"context"
	"os"

	"instar/quicdemo"
)

func main() {
	os.Exit(quicdemo.Main(context.Background(), os.Args[1:], quicdemo.Env{}))
}
