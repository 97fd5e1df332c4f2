// Times one routed expert of DeepSeek-V3 (gate, up, down) with its weights in memory, on one thread by CPU time, beside the time of reading
// the bytes. Built against two checkouts, it compares them: g++ -std=c++17 -O3 -march=native -ffp-contract=fast -fno-math-errno -w
// -I dsjax/kernels/native tools/expert_products.cc dsjax/kernels/native/{others,products_*}.cc -o products; taskset -c 0 ./products 256 2
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <cmath>
#include <vector>
#include <map>
#include <string>
#include <sys/mman.h>
#include "experts.h"
#include "dense.h"
#include "fp4.h"
using namespace dsjax;
double now(){timespec t;clock_gettime(CLOCK_THREAD_CPUTIME_ID,&t);return t.tv_sec+t.tv_nsec*1e-9;}
char* big(size_t n){ size_t r=(n+(1<<21)-1)>>21<<21; char*p=(char*)aligned_alloc(1<<21,r); madvise(p,r,MADV_HUGEPAGE); return p;}
struct Fmt{const char*name;int bytes;int block;bool ints;};
int main(int argc,char**argv){ std::vector<long> rowset; for(int i=3;i<argc;i++) rowset.push_back(atol(argv[i])); if(rowset.empty()) rowset={1,4,32};
  const long D=7168,F=2048; long total=(argc>1?atol(argv[1]):256)<<20; int rounds=argc>2?atoi(argv[2]):6; unsigned seed=1;
  auto rnd=[&]{seed=seed*1664525u+1013904223u;return seed>>8;};
  double readbest=0; std::vector<std::string> lines;
  { char*p=big(total); memset(p,1,total); for(int r=0;r<6;r++){ double t=now(); Vec acc[4]={}; for(long i=0;i<total;i+=256){for(int j=0;j<4;j++){__builtin_prefetch(p+i+j*64+(32<<10),0,2);acc[j]+=load((float*)(p+i)+j*16);}} t=now()-t; volatile float s=sum(acc[0]+acc[1]+acc[2]+acc[3]); readbest=std::max(readbest,total/t);} free(p);}
  printf("read %.1f GB/s\n",readbest/1e9);
  for(Fmt f: {Fmt{"bf16",2,0,false},Fmt{"FP8",1,0,false},Fmt{"NVFP4",1,16,false},Fmt{"MXFP4",1,32,false},Fmt{"INT4",1,32,true}}){
    long n=D*F, per=f.block? n*3/2 : n*3*f.bytes; long sb=f.block? n/f.block*(f.ints?2:1):0; long X=std::max(2L,total/(per+3*sb));
    long gu=f.block? n: n*2*f.bytes, dn=gu/2;
    char*g=big(gu*X),*d=big(dn*X); for(long i=0;i<gu*X;i+=4){unsigned v=rnd()*256u+rnd(); if(f.bytes==2) v=(v&0x807f807f)|0x3f003f00; else if(!f.block) v&=0xbfbfbfbf; memcpy(g+i,&v,4);} memcpy(d,g,dn*X);
    std::vector<char> gs,ds; std::vector<float> gw(2*X,0.5f),dw(X,0.25f); char *gsp,*dsp;
    if(f.block){ gsp=big(2*sb*X),dsp=big(sb*X); for(long i=0;i<2*sb*X;i++) gsp[i]= f.ints? (i%2?0x3c:rnd()) : f.block==32? 120+rnd()%8 : rnd()%0x70; memcpy(dsp,gsp,sb*X);} else { long s=(D/128)*2*(F/128)*X; gsp=big(4*s),dsp=big(4*s); for(long i=0;i<s;i++) ((float*)gsp)[i]=((float*)dsp)[i]=0.01f*(1+rnd()%100);}
    for(long N: rowset){
      std::vector<float> x(N*D),w(N,1.0f),out(N*D); std::vector<int32_t> ids(N); for(auto&v:x) v=(rnd()%1000)/1000.f-.5f;
      double best=1e9; unsigned long sumbits=0;
      for(int r=0;r<rounds;r++) for(long e=0;e<X;e++){ for(auto&i:ids)i=e;
        Experts k; k.gate_up=g;k.down=d;k.gate_up_scale=gsp;k.down_scale=dsp;k.bytes=f.bytes;k.layer=0;k.X=X;k.D=D;k.F=F;k.rows=x.data();k.row_stride=D;k.ids=ids.data();k.weights=w.data();k.N=N;k.K=1;k.out=out.data();k.threads=1;k.pieces=8;k.apart=false;k.fp4_block=f.block;k.integers=f.ints; if(f.block==16){k.gate_up_whole=gw.data();k.down_whole=dw.data();}
        static std::map<size_t,char*> sc; size_t need=k.scratch_bytes(); if(!sc[need]) sc[need]=big(need);
        double t=now(); run_kernel(k,sc[need],Schedule()); t=now()-t; best=std::min(best,t);
        if(r==0) for(auto v:out) sumbits=sumbits*31+bits<uint32_t>(v); }
      double bytes=per+3*sb; printf("%-6s rows %2ld  %.3f ms  share of bytes %.0f %%  of MACs %.1f G/s  bits %lx\n",f.name,N,best*1e3,100*bytes/readbest/best,3*n*N/best/1e9,sumbits); fflush(stdout);
    }
    free(g);free(d);free(gsp);free(dsp);
  }
}
